"""Bundles in OCI registries, in the layout of CNCF ModelPack; edgeq_device.oci has the client."""
