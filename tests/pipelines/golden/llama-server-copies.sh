llama-server --model target.gguf --spec-type ngram-simple --spec-ngram-simple-size-n 6 --spec-ngram-simple-size-m 8
