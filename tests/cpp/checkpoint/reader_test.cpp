#include "shardfield/checkpoint/reader.h"

#include <cstring>
#include <filesystem>
#include <fstream>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <sys/stat.h>
#include <unistd.h>

#include "shardfield/checkpoint/load.h"
#include "shardfield/checkpoint/sha256.h"
#include "shardfield/comm/in_process.h"
#include "shardfield/tensor/scatter.h"

namespace shardfield::checkpoint {
namespace {

namespace fs = std::filesystem;

/// A folder as the format's page describes it: "model/weight" (3, 2) float32 with values 0 to 5, in
/// two files of rows 0 to 1 and row 2, and the value step = 7.
class Checkpoint : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() / ("shardfield-reader-" + std::to_string(::getpid()));
    fs::create_directories(folder_);
    const std::string first = write_piece("0123456789abcdef-r00000.safetensors", {0, 1, 2, 3}, 2);
    const std::string second = write_piece("0123456789abcdef-r00001.safetensors", {4, 5}, 1);
    write_index(R"({"format": "shardfield-sharded", "version": 1, "save": "0123456789abcdef",
 "structure": {"dict": [["model", {"dict": [["weight", {"tensor": "model/weight"}]]}],
 ["step", {"value": 7}]]}, "tensors": {"model/weight": {"shape": [3, 2], "dtype": "F32",
 "pieces": [)" + first +
                R"("offset": [0, 0], "shape": [2, 2]}, )" + second +
                R"("offset": [2, 0], "shape": [1, 2]}]}}})");
  }
  void TearDown() override { fs::remove_all(folder_); }

  /// Writes a safetensors file and returns the start of its entry in the index.
  std::string write_piece(const std::string& name, const std::vector<float>& values, int rows) {
    const size_t bytes = values.size() * sizeof(float);
    std::string header = R"({"model/weight":{"dtype":"F32","shape":[)" + std::to_string(rows) +
                         R"(,2],"data_offsets":[0,)" + std::to_string(bytes) + "]}}";
    header.resize((header.size() + 7) / 8 * 8, ' ');
    const uint64_t length = header.size();
    std::ofstream file(folder_ / name, std::ios::binary);
    file.write(reinterpret_cast<const char*>(&length), 8);
    file << header;
    file.write(reinterpret_cast<const char*>(values.data()), static_cast<std::streamsize>(bytes));
    return R"({"file": ")" + name + R"(", "begin": )" + std::to_string(8 + length) +
           R"(, "sha256": [")" + sha256(values.data(), bytes) + R"("], )";
  }

  void write_index(const std::string& text) {
    std::ofstream(folder_ / "shardfield.index.json")
        << R"({"sha256": ")" << sha256(text.data(), text.size()) << R"(", "index": )" << text
        << "}";
  }

  fs::path folder_;
};

std::string error_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return {};
}

bool says(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST_F(Checkpoint, ABoxAcrossTwoFiles) {
  Reader reader(folder_);
  EXPECT_TRUE(at::equal(reader.read("model/weight"), at::arange(6, at::kFloat).view({3, 2})));
  const at::Tensor part = reader.read("model/weight", Box{{1, 1}, {2, 1}});
  EXPECT_TRUE(at::equal(part, at::tensor({3.F, 5.F}).view({2, 1})));
  EXPECT_EQ(reader.bytes_read(), 24 + 8);
  EXPECT_EQ(reader.integer("step"), 7);
  EXPECT_EQ(reader.save(), "0123456789abcdef");
  EXPECT_TRUE(says(error_of([&] { reader.read("bias"); }), "no tensor 'bias'"));
}

TEST_F(Checkpoint, EveryRankReadsItsPieceOfAModule) {
  comm::run_in_process({3}, [&](const spec::Mesh& mesh) {
    torch::nn::Linear linear(torch::nn::LinearOptions(2, 3).bias(false));
    const at::Tensor zeros = at::zeros({3, 2});
    linear->weight.set_data(at::ones({3, 2}));
    Reader plain(folder_);
    load_module(plain, *linear);
    EXPECT_TRUE(at::equal(linear->weight, at::arange(6, at::kFloat).view({3, 2})));
    Reader reader(folder_);
    const at::Tensor cut = tensor::shard_tensor(zeros, mesh, {0}).detach();
    read_into(reader, "model/weight", cut);
    EXPECT_EQ(reader.bytes_read(), 8);
    EXPECT_TRUE(at::equal(tensor::full_tensor(cut), at::arange(6, at::kFloat).view({3, 2})));
  });
}

TEST_F(Checkpoint, DamageAndForeignShapesAreNamed) {
  {
    std::fstream file(folder_ / "0123456789abcdef-r00001.safetensors",
                      std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(-1, std::ios::end);
    file.put('?');
  }
  Reader reader(folder_);
  EXPECT_EQ(reader.read("model/weight", Box{{0, 0}, {2, 2}}).sizes(), (at::IntArrayRef{2, 2}));
  EXPECT_TRUE(says(error_of([&] { reader.read("model/weight"); }), "the file is damaged"));
  EXPECT_TRUE(says(error_of([&] { read_into(reader, "model/weight", at::zeros({2, 3})); }),
                   "Float [3, 2] in the checkpoint, expected Float [2, 3]"));
  fs::resize_file(folder_ / "0123456789abcdef-r00001.safetensors", 20);
  Reader shorter(folder_, /*verify=*/false);
  EXPECT_TRUE(says(error_of([&] { shorter.read("model/weight"); }), "cut off inside"));
  std::ofstream(folder_ / "shardfield.index.json", std::ios::app) << " ";
  EXPECT_TRUE(says(error_of([&] { Reader again(folder_); }), "is damaged: its hash differs"));
}

TEST_F(Checkpoint, ABoxOutsideOfTheTensorIsRefused) {
  Reader reader(folder_);
  for (const Box& box : {Box{{0, 0}, {4, 2}}, Box{{-1, 0}, {1, 2}}, Box{{2, 0}, {2, 2}},
                         Box{{0, 0}, {3, INT64_MAX}}, Box{{0}, {3}}})
    EXPECT_TRUE(says(error_of([&] { reader.read("model/weight", box); }),
                     "expected a box inside of 'model/weight' ([3, 2])"));
}

TEST_F(Checkpoint, WhatWouldExhaustTheStackOrWaitIsRefused) {
  const std::string deep = std::string(300000, '[') + std::string(300000, ']');
  write_index(R"({"format": "shardfield-sharded", "version": 1, "save": "0123456789abcdef",
 "tensors": {}, "structure": )" +
              deep + "}");
  EXPECT_TRUE(says(error_of([&] { Reader reader(folder_); }), "malformed: nested too deep"));
  const fs::path file = folder_ / "deep.safetensors";
  const uint64_t length = deep.size();
  std::ofstream(file, std::ios::binary).write(reinterpret_cast<const char*>(&length), 8) << deep;
  EXPECT_TRUE(says(error_of([&] { Reader reader(file); }), "malformed: nested too deep"));
  fs::remove(file);
  ASSERT_EQ(::mkfifo(file.c_str(), 0600), 0);
  EXPECT_TRUE(says(error_of([&] { Reader reader(file); }), "it is no file"));
}

TEST_F(Checkpoint, OneFileAlone) {
  Reader reader(folder_ / "0123456789abcdef-r00000.safetensors");
  EXPECT_TRUE(at::equal(reader.read("model/weight"), at::arange(4, at::kFloat).view({2, 2})));
}

TEST(Sha256, KnownDigests) {
  EXPECT_EQ(sha256("", 0), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(sha256("abc", 3), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

}  // namespace
}  // namespace shardfield::checkpoint
