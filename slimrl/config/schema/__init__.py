"""Every setting of a run with its default: a module for each section, which `recipe.py` puts together."""
