"""Settings: their declaration, flags, recipes, other programs' recipes, and hints at misspelled names."""
