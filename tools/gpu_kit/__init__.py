"""All that is proven and measured on a machine with a GPU, in the minutes that there is one."""
