"""Questions of ours that are still open. The stages import nothing from here."""
