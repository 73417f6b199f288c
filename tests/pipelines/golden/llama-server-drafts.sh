llama-server --model target.gguf --spec-type draft-simple --spec-draft-model draft.gguf --spec-draft-n-max 4 --spec-draft-n-min 0 --spec-draft-p-min 0
