"""One module per subcommand; each exposes ``command``, and its docstring is the help text."""
