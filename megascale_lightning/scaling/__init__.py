"""How sources are spread over loaders."""
