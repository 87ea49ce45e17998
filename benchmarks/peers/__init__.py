"""Other people's drift detectors on our streams, each in an environment of its own: their pins fight ours."""
