"""Safety: what keeps our failures out of the script and the script's exceptions whole."""
