"""Questions of ours: verifiers compared and timed, labelling timed. The stages import nothing from here."""
