// Which device a thread works on.
#pragma once

namespace standin {

// The calling thread's device; 0 before it has set one.
int get_device();

void set_device(int device);

// How many devices there are: NPU_STANDIN_DEVICES, or one.
int count_devices();

}  // namespace standin
