"""The two programs of the launcher; the real ones talk by MPI and ZMQ, these by TCP."""
