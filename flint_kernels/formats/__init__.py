"""Number formats and file containers: NVFP4 in its two layouts, and GGUF."""
