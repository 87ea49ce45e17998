"""The canaries: fixed inputs with recorded outputs, which show whether a reference is still the recorded one."""
