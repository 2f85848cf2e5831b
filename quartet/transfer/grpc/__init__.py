"""TransferService over gRPC, both sides of it; the only part of ``quartet.transfer`` that knows stubs."""
