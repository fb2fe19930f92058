// Operators that differ in their formula alone, one line each. The formula speaks of `self` and `other`.
#pragma once

#include "operator.h"

// From one tensor, and in place.
#define STANDIN_UNARY(symbol, formula)                        \
    STANDIN_OPERATOR(symbol, (AclTensor self, AclTensor out), \
                     [self = hold(self), out = hold(out)] { store(out, formula); })

#define STANDIN_UNARY_IN_PLACE(symbol, formula) \
    STANDIN_OPERATOR(symbol, (AclTensor self), [self = hold(self)] { formula; })

// From a tensor and another operand, which is a tensor (AclTensor) or a number (AclScalar), and in place.
#define STANDIN_BINARY(symbol, Operand, formula)                             \
    STANDIN_OPERATOR(symbol, (AclTensor self, Operand other, AclTensor out), \
                     [self = hold(self), other = hold(other), out = hold(out)] { store(out, formula); })

#define STANDIN_BINARY_IN_PLACE(symbol, Operand, formula) \
    STANDIN_OPERATOR(symbol, (AclTensor self, Operand other), [self = hold(self), other = hold(other)] { formula; })
