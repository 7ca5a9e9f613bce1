"""DeepSpeed: the optimizer from a ds_config.json, and the asynchronous schedule for its PipelineEngine."""
