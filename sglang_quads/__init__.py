"""SGLang plugin for the method quads_nvfp4: not there yet."""
