"""The CPU kernels in C++: source, build, loader, tape. Optional: else the references run."""
