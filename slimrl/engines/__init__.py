"""SGLang whole: its servers, their clients, the choice of an engine for each request, and the plugin inside."""
