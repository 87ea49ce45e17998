"""The storm: every process is killed and stopped under load, disks fill, servers go away, and everything is counted."""
