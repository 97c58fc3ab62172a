// Headers of every C++ test, compiled once. Never include this by hand.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>
