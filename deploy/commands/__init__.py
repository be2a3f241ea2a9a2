"""The commands of `busway`, one file a family. Their bodies import what they need when they run: `--help` and
`version` stay quick."""
