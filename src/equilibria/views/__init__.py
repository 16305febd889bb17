"""All that people look at: terminal, notebook, HTML; one package or module per thing shown."""
