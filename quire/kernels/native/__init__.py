"""Native CPU kernels in C++: source, build, loader, tape. Without them the references run."""
