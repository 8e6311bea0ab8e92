"""The command line. The only package that prints, exits, or turns an error into a message."""
