"""What can help a poor result, one kind a file with its object `REMEDY`: see `edgeq.pipeline.remedies`."""
