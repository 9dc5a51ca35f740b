"""What it costs to analyse a trace, beside the other analysers."""
