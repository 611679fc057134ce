"""Games of ALFWorld's domain, whose problems are drawn here: the published ones are a download."""
