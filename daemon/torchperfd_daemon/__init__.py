"""The torchperfd daemon, analyser and command line. Never imports torch."""
