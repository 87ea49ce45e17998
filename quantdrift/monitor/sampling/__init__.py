"""The sampling policy: what each slice needs, how far the shadow lags, and publishing the rates."""
