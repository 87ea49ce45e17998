"""What people read: the weekly report."""
