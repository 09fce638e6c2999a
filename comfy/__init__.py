"""A client for ComfyUI: errors that say what they mean, a graph builder, an event stream."""
