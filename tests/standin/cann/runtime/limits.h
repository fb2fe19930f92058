// How many cores the stand-in says a device has. Nothing runs on them: the numbers only come back.
#pragma once

#include <cstdint>

namespace standin {

// Of an Ascend 910B.
constexpr uint32_t CUBE_CORES = 24;
constexpr uint32_t VECTOR_CORES = 48;

}  // namespace standin
