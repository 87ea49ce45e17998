"""The load test of a release: drive an endpoint in the shape of recorded traffic, past the load at which requests begin to queue."""
