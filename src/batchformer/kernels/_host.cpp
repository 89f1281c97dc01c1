// Does again what `record.py` wrote down: allocations, matrix products and launches of kernels, without Python.
//
// A small layer is over on the device long before Python has started all of it. A `Program` is the list of its steps
// for inputs of one kind; slots hold its tensors. `layer` runs one program forward and one backward, as a node of
// autograd. Built by `host_library.py`; needs torch and a compiler, no CUDA toolkit: functions of CUDA are handed in as
// addresses.

#include "_host_products.h"

#include <ATen/ATen.h>
#include <ATen/NativeFunctions.h>
#include <ATen/SavedTensorHooks.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <array>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

namespace {

using at::Tensor;
using batchformer::Blas;
using batchformer::Layout;
using batchformer::Product;
using torch::autograd::variable_list;
using Numbers = std::vector<int64_t>;

constexpr int64_t kAlignment = 16;  // bytes: what the kernels were compiled for
constexpr size_t kMostArguments = 40;
constexpr int kNoContext = 201;  // CUDA_ERROR_INVALID_CONTEXT
constexpr int64_t kSeeds = int64_t(1) << 62;

// cuLaunchKernel, or what stands for it in tests
using Launcher = int (*)(void* function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned shared,
                         void* stream, void** arguments, void** extra);

// A tensor as part of what a slot holds. In Python: [slot, is_whole, offset, sizes..., strides...].
struct View {
  int64_t slot;
  bool is_whole;
  int64_t offset;
  Numbers sizes, strides;

  explicit View(const Numbers& n) : slot(n.at(0)), is_whole(n.at(1) != 0), offset(n.at(2)) {
    const auto middle = n.begin() + 3 + (n.size() - 3) / 2;
    sizes.assign(n.begin() + 3, middle);
    strides.assign(middle, n.end());
  }

  Tensor of(const Tensor& held) const {
    // the function behind as_strided: the way there takes longer
    return is_whole ? held : at::native::as_strided_tensorimpl(held, sizes, strides, held.storage_offset() + offset);
  }

  Tensor of(const variable_list& slots) const { return of(slots[slot]); }

  // Where it begins.
  void* start(const variable_list& slots) const {
    const auto& held = slots[slot];
    return static_cast<char*>(held.data_ptr()) + offset * static_cast<int64_t>(held.element_size());
  }

  std::optional<Layout> layout() const { return Layout::of(sizes, strides); }
};

enum class Kind { empty, seed, mm, addmm, addmm_, baddbmm_, add_, cat, to, clone, launch };

Kind kind_of(const std::string& name) {
  static const std::array<const char*, 11> names = {"empty", "seed", "mm", "addmm", "addmm_",  "baddbmm_",
                                                    "add_",  "cat",  "to", "clone", "launch"};
  for (size_t k = 0; k < names.size(); ++k)
    if (name == names[k]) return static_cast<Kind>(k);
  TORCH_CHECK(false, "batchformer: unknown step ", name);
}

struct Step {
  Kind kind;
  int64_t into;               // the slot it fills, -1: none
  std::vector<View> operands;
  at::ScalarType dtype;       // of what it makes
  Numbers sizes;              // of an empty tensor
  void* function;             // of a launch, and so on
  unsigned programs, threads, shared;
  Numbers slots, values;      // of each argument: the slot it points into (-1: none), and the offset in bytes or value
  Numbers over;               // slots that nothing reads later
  std::optional<Product> product;  // of mm and addmm_, where cuBLAS can take it as it lies
};

// How an input has to be for the program to fit it.
struct InputKind {
  Numbers sizes, strides;
  at::ScalarType dtype;
  c10::Device device;

  bool fits(const Tensor& t) const {
    if (t.sizes() != sizes || t.scalar_type() != dtype || t.device() != device) return false;
    for (size_t k = 0; k < sizes.size(); ++k)
      if (sizes[k] != 1 && t.strides()[k] != strides[k]) return false;
    return reinterpret_cast<int64_t>(t.const_data_ptr()) % kAlignment == 0;
  }

  Tensor copy(const Tensor& t) const { return at::empty_strided(sizes, strides, t.options()).copy_(t); }
};

struct Program : torch::CustomClassHolder {
  Program(int64_t launcher, const Numbers& blas) : launcher(reinterpret_cast<Launcher>(launcher)), blas(blas) {}

  void takes(const Tensor& t) {
    inputs.push_back({t.sizes().vec(), t.strides().vec(), t.scalar_type(), t.device()});
    slots = inputs.size();
  }

  // numbers: of "empty" the sizes; of "launch" function, programs, threads, shared bytes, then (slot, value) by turns.
  void add(const std::string& name, int64_t into, const std::vector<Numbers>& operands, int64_t dtype,
           const Numbers& numbers) {
    Step step{kind_of(name), into, {}, static_cast<at::ScalarType>(dtype), {}, nullptr, 0, 0, 0, {}, {}, {}, {}};
    for (const auto& operand : operands) step.operands.emplace_back(operand);
    if (step.kind == Kind::empty) step.sizes = numbers;
    if (step.kind == Kind::mm || step.kind == Kind::addmm_) plan_product(step);
    if (step.kind == Kind::launch) {
      step.function = reinterpret_cast<void*>(numbers.at(0));
      step.programs = numbers.at(1), step.threads = numbers.at(2), step.shared = numbers.at(3);
      for (size_t k = 4; k + 1 < numbers.size(); k += 2) {
        step.slots.push_back(numbers[k]);
        step.values.push_back(numbers[k + 1]);
      }
      TORCH_CHECK(step.slots.size() <= kMostArguments, "batchformer: a kernel with too many arguments");
    }
    slots = std::max(slots, into + 1);
    steps.push_back(std::move(step));
  }

  static void plan_product(Step& step) {
    const auto count = step.operands.size();
    const auto &left = step.operands.at(count - 2), &right = step.operands.at(count - 1);
    if (left.sizes.size() != 2 || right.sizes.size() != 2) return;
    const auto rows = left.sizes[0], inner = left.sizes[1], columns = right.sizes[1];
    if (step.kind == Kind::mm) step.sizes = {rows, columns};
    const auto into = step.kind == Kind::mm ? Layout::of({rows, columns}, {columns, 1}) : step.operands[0].layout();
    step.product = Product::of(left.layout(), right.layout(), into, rows, columns, inner);
  }

  void gives(const std::vector<Numbers>& views) {
    for (const auto& view : views) outputs.emplace_back(view);
    let_go();
  }

  // Every slot is let go after the last step that reads it, unless it is given back.
  void let_go() {
    Numbers last(slots, -1);
    for (size_t k = 0; k < steps.size(); ++k) {
      if (steps[k].into >= 0) last[steps[k].into] = k;
      for (const auto& operand : steps[k].operands) last[operand.slot] = k;
      for (auto slot : steps[k].slots)
        if (slot >= 0) last[slot] = k;
    }
    for (const auto& output : outputs) last[output.slot] = -1;
    for (int64_t slot = 0; slot < slots; ++slot)
      if (last[slot] >= 0) steps[last[slot]].over.push_back(slot);
  }

  bool fits(at::TensorList given) const {
    if (given.size() != inputs.size()) return false;
    for (size_t k = 0; k < inputs.size(); ++k)
      if (!inputs[k].fits(given[k])) return false;
    return true;
  }

  variable_list run(variable_list held) const {
    // What was written down has its types already: autocast, which may be on or off by now, must not change them.
    c10::impl::ExcludeDispatchKeyGuard as_they_are(c10::autocast_dispatch_keyset);
    const auto options = held.front().options().requires_grad(false);
    const auto device = held.front().device();
    c10::OptionalDeviceGuard on(device);
    void* stream = nullptr;
    if (device.is_cuda())
      stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle();
    held.resize(slots);
    const bool has_blas = blas.is_on();
    void* handle = nullptr;  // of cuBLAS
    for (const auto& step : steps) {
      if (has_blas && step.product && is_of_bfloat16(step, held)) {
        if (handle == nullptr) handle = blas.handle();
        if (step.into >= 0) held[step.into] = at::empty(step.sizes, options.dtype(at::kBFloat16));
        multiply(step, held, handle);
      } else if (step.kind == Kind::launch) {
        launch(step, held, stream);
      } else {
        by_torch(step, held, options);
      }
      for (auto slot : step.over) held[slot].reset();
    }
    variable_list given;
    given.reserve(outputs.size());
    for (const auto& output : outputs) given.push_back(output.of(held));
    return given;
  }

  static void by_torch(const Step& step, variable_list& held, const at::TensorOptions& options) {
    const auto operand = [&](size_t k) { return step.operands[k].of(held); };
    switch (step.kind) {
      case Kind::empty: held[step.into] = at::empty(step.sizes, options.dtype(step.dtype)); break;
      case Kind::seed: held[step.into] = at::randint(kSeeds, {1}, options.dtype(at::kLong)); break;
      case Kind::mm: held[step.into] = at::mm(operand(0), operand(1)); break;
      case Kind::addmm: held[step.into] = at::addmm(operand(0), operand(1), operand(2)); break;
      case Kind::addmm_: operand(0).addmm_(operand(1), operand(2)); break;
      case Kind::baddbmm_: operand(0).baddbmm_(operand(1), operand(2)); break;
      case Kind::add_: operand(0).add_(operand(1)); break;
      case Kind::cat: held[step.into] = at::cat(all_of(step, held)); break;
      case Kind::to: held[step.into] = operand(0).to(step.dtype); break;
      case Kind::clone: held[step.into] = operand(0).clone(at::MemoryFormat::Contiguous); break;
      case Kind::launch: break;  // not torch's
    }
  }

  static bool is_of_bfloat16(const Step& step, const variable_list& held) {
    for (const auto& operand : step.operands)
      if (held[operand.slot].scalar_type() != at::kBFloat16) return false;
    return true;
  }

  void multiply(const Step& step, const variable_list& held, void* handle) const {
    const auto count = step.operands.size();
    const bool adds = step.kind == Kind::addmm_;
    void* into = adds ? step.operands[0].start(held) : held[step.into].data_ptr();
    blas.multiply(handle, *step.product, step.operands[count - 2].start(held), step.operands[count - 1].start(held),
                  into, adds ? 1.0f : 0.0f);
  }

  static variable_list all_of(const Step& step, const variable_list& held) {
    variable_list operands;
    for (const auto& operand : step.operands) operands.push_back(operand.of(held));
    return operands;
  }

  void launch(const Step& step, const variable_list& held, void* stream) const {
    std::array<int64_t, kMostArguments> values;
    std::array<void*, kMostArguments> arguments;
    for (size_t k = 0; k < step.slots.size(); ++k) {
      values[k] = step.values[k];
      if (step.slots[k] >= 0) values[k] += reinterpret_cast<int64_t>(held[step.slots[k]].data_ptr());
      arguments[k] = &values[k];
    }
    const auto start = [&] {
      return launcher(step.function, step.programs, 1, 1, step.threads, 1, 1, step.shared, stream, arguments.data(),
                      nullptr);
    };
    int code = start();
    if (code == kNoContext) {  // the driver does not know this thread yet: autograd has its own
      at::zeros({1}, held[step.slots[0]].options());
      code = start();
    }
    TORCH_CHECK(code == 0, "batchformer: a kernel could not be started (CUDA driver error ", code, ")");
  }

  Launcher launcher;
  Blas blas;
  std::vector<InputKind> inputs;
  std::vector<Step> steps;
  std::vector<View> outputs;
  int64_t slots = 0;
};

using ProgramPtr = c10::intrusive_ptr<Program>;

// Programs for as long as the process lives, by number: a node of autograd may keep a number whatever looks at it.
struct Pair {
  ProgramPtr ahead, back;
};

std::mutex guard;
std::deque<Pair> pairs;  // a deque: what is in there does not move when it grows

int64_t keep(const ProgramPtr& ahead, const ProgramPtr& back) {
  const std::lock_guard<std::mutex> lock(guard);
  pairs.push_back({ahead, back});
  return static_cast<int64_t>(pairs.size()) - 1;
}

const Pair& pair_of(int64_t number) {
  const std::lock_guard<std::mutex> lock(guard);
  return pairs.at(number);
}

// Forward gives the output and what the backward takes beside the gradient; backward one gradient for each input that
// can have one.
struct Layer : torch::autograd::Function<Layer> {
  static Tensor forward(torch::autograd::AutogradContext* ctx, at::TensorList inputs, int64_t number) {
    at::AutoDispatchBelowADInplaceOrView below;
    const auto& ahead = *pair_of(number).ahead;
    auto given = ahead.run(inputs.vec());
    ctx->saved_data["number"] = number;
    if (at::SavedTensorDefaultHooks::get_hooks()) {
      // A checkpoint, or an offload, sees what it would see of Python, in the same order.
      ctx->save_for_backward({given.begin() + 1, given.end()});
    } else {
      // Of inputs the tensors themselves, not views, so that torch sees when one is changed in between.
      variable_list kept, made;
      for (size_t k = 1; k < given.size(); ++k) {
        const auto slot = static_cast<size_t>(ahead.outputs[k].slot);
        if (slot < inputs.size())
          kept.push_back(inputs[slot]);
        else
          made.push_back(std::move(given[k]));
      }
      ctx->save_for_backward(std::move(kept));
      ctx->saved_data["made"] = std::move(made);
    }
    return given.front();
  }

  static variable_list backward(torch::autograd::AutogradContext* ctx, variable_list arrived) {
    const auto& [ahead, back] = pair_of(ctx->saved_data["number"].toInt());
    const bool is_watched = at::GradMode::is_enabled() && arrived.front().requires_grad();
    variable_list gradients;
    {
      at::AutoDispatchBelowADInplaceOrView below;
      gradients = back->run(inputs_of(ctx, *ahead, *back, arrived.front().contiguous()));
    }
    if (is_watched) {
      for (auto& gradient : gradients) gradient = gradient.detach().requires_grad_();
      const auto count = static_cast<int64_t>(gradients.size());
      gradients = torch::autograd::DelayedError("second derivatives of the fused layer: use backend='sdpa'", count)
                      .apply(std::move(gradients));
    }
    gradients.resize(gradients.size() + 2);  // none for `valid` and the number
    return gradients;
  }

  static variable_list inputs_of(torch::autograd::AutogradContext* ctx, const Program& ahead, const Program& back,
                                 Tensor grad) {
    variable_list inputs = {std::move(grad)};
    auto saved = ctx->get_saved_variables();
    const auto found = ctx->saved_data.find("made");
    if (found == ctx->saved_data.end()) {
      for (auto& tensor : saved) inputs.push_back(std::move(tensor));
    } else {
      auto made = found->second.toTensorVector();
      size_t next_saved = 0, next_made = 0;
      for (size_t k = 1; k < ahead.outputs.size(); ++k) {
        const auto& view = ahead.outputs[k];
        const bool is_input = static_cast<size_t>(view.slot) < ahead.inputs.size();
        inputs.push_back(is_input ? view.of(saved.at(next_saved++)) : std::move(made.at(next_made++)));
      }
      // Unless somebody wants to go through here again, each is let go as soon as it was used.
      if (!torch::autograd::get_current_graph_task_keep_graph()) ctx->saved_data.erase(found);
    }
    TORCH_CHECK(inputs.size() == back.inputs.size(), "batchformer: saved tensors are missing");
    for (size_t k = 0; k < inputs.size(); ++k) {
      // a gradient that starts in the middle of something, or what a hook on saved tensors gave back
      const auto& kind = back.inputs[k];
      TORCH_CHECK(inputs[k].sizes() == kind.sizes && inputs[k].scalar_type() == kind.dtype,
                  "batchformer: a saved tensor came back as another one");
      if (!kind.fits(inputs[k])) inputs[k] = kind.copy(inputs[k]);
    }
    return inputs;
  }
};

// Nothing, where the inputs are of another kind, or not all that can have a gradient want one.
variable_list layer(at::TensorList inputs, int64_t number) {
  if (!pair_of(number).ahead->fits(inputs)) return {};
  for (const auto& input : inputs)
    if (at::isFloatingType(input.scalar_type()) && !input.requires_grad()) return {};
  return {Layer::apply(inputs, number)};
}

}  // namespace

// The name is given to the compiler, and unlike that of any other build, of which a process may have loaded one before.
#define LIBRARY(name, m) TORCH_LIBRARY(name, m)

LIBRARY(BATCHFORMER_LIBRARY, m) {
  m.class_<Program>("Program")
      .def(torch::init<int64_t, Numbers>())
      .def("takes", &Program::takes)
      .def("add", &Program::add)
      .def("gives", &Program::gives);
  m.def("keep", keep);
  m.def("layer", layer);
}
