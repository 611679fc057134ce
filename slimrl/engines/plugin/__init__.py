"""Code that runs inside SGLang's processes."""
