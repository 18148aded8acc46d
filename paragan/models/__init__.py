"""Trained models: files, sampling, import from other libraries, export to other programs, hub, web page, video."""
