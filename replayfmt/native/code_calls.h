// Work that no dispatcher calls: compiled regions that are noted as a whole, or the kernels and allocations of their
// generated code. And the keys that a thread is given around it.
//
// What is new about it takes the complete path, in Python (recording/undispatched.py, recording/inductor.py); calls
// like one that took it are recorded here. All of it is called with the interpreter's lock.

#pragma once

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/frontend/function_schema_parser.h>

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "hot_run.h"

namespace opreplay {

// An object that Python calls like a function, made of a C++ one that takes (callee, arguments, their number).
template <typename Callee, PyObject* (*call)(Callee&, PyObject* const*, Py_ssize_t)>
py::object callable(std::unique_ptr<Callee> callee, const char* name) {
  static PyMethodDef definition = {
      name,
      reinterpret_cast<PyCFunction>(
          reinterpret_cast<void*>(+[](PyObject* self, PyObject* const* given, Py_ssize_t count) -> PyObject* {
            HANDLE_TH_ERRORS
            return call(*static_cast<Callee*>(PyCapsule_GetPointer(self, nullptr)), given, count);
            END_HANDLE_TH_ERRORS
          })),
      METH_FASTCALL, nullptr};
  const auto capsule = py::reinterpret_steal<py::object>(PyCapsule_New(callee.release(), nullptr, [](PyObject* self) {
    delete static_cast<Callee*>(PyCapsule_GetPointer(self, nullptr));
  }));
  return py::reinterpret_steal<py::object>(PyCFunction_New(&definition, capsule.ptr()));
}

// The result of a Python function, whose exception becomes one of C++.
inline py::object checked(PyObject* result) {
  if (!result) {
    python_error error;
    error.persist();
    throw error;
  }
  return py::reinterpret_steal<py::object>(result);
}

// The capture in progress, where it is this session's, and where nothing but the hook sees what this thread calls now.
inline std::shared_ptr<Capture> capture_seeing(const Session& session) {
  std::shared_ptr<Capture> capture = capture_in_progress();
  const bool sees = capture && capture->session.get() == &session && session.hot.load(std::memory_order_relaxed) &&
                    c10::impl::tls_is_dispatch_key_included(kKey) && !c10::impl::tls_is_dispatch_key_excluded(kKey) &&
                    c10::impl::TorchDispatchModeTLS::stack_len() == 0 && session.streams.are_default();
  return sees ? capture : nullptr;
}

inline c10::StorageImpl* storage_impl(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

// A compiled region, after its first call: what is recorded of each further one is the same.
struct NotedRegion {
  std::shared_ptr<Session> session;
  int64_t signature;                          // of its unsupported record
  std::optional<std::vector<size_t>> writes;  // the arguments that it may write, by index in its list; none: any
  py::object mark;  // (tensor) -> whether nothing more need be said of its storage until it is used; it may be written
};

// A tensor that a region is given. It may let go of it.
struct GivenTensor {
  c10::StorageImpl* storage;
  c10::weak_intrusive_ptr<c10::TensorImpl> tensor;
};

// The memory of a tensor may have been written unseen.
inline void mark_written(const NotedRegion& region, PyObject* tensor) {
  Session& session = *region.session;
  c10::StorageImpl* impl = storage_impl(THPVariable_Unpack(tensor));
  {
    std::lock_guard<std::mutex> lock(session.mutex);
    const Storage* storage = session.storage_of(impl);
    if (!storage || storage->marked) {
      return;
    }
  }
  if (py::cast<bool>(checked(PyObject_CallOneArg(region.mark.ptr(), tensor)))) {
    std::lock_guard<std::mutex> lock(session.mutex);
    if (Storage* storage = session.storage_of(impl)) {
      storage->marked = true;
    }
  }
}

// Calls `visit` with the tensors in a value and in its lists. Whether these, numbers and None are all that it holds.
inline bool visit_tensors(PyObject* value, const std::function<bool(PyObject*)>& visit) {
  if (THPVariable_Check(value)) {
    return is_plain(THPVariable_Unpack(value)) && visit(value);
  }
  if (PyTuple_Check(value) || PyList_Check(value)) {
    for (Py_ssize_t index = 0; index < PySequence_Fast_GET_SIZE(value); index++) {
      const auto item = py::reinterpret_borrow<py::object>(PySequence_Fast_GET_ITEM(value, index));
      if (!visit_tensors(item.ptr(), visit)) {
        return false;
      }
    }
    return true;
  }
  return value == Py_None || PyLong_Check(value) || PyFloat_Check(value);
}

// While it lives, what the calling thread does belongs to work that is recorded as a whole.
class Covered {
 public:
  explicit Covered(const Session& session) : leave_(session.leave) {
    if (session.enter) {
      session.enter();
    }
  }
  Covered(const Covered&) = delete;
  Covered& operator=(const Covered&) = delete;
  ~Covered() {
    if (leave_) {
      leave_();
    }
  }

 private:
  void (*leave_)();
};

// Given (the function that runs a region, the region, its arguments as a tuple): its results, with a record of the
// call; NotImplemented, and nothing was done, where the complete path has to look. What it may write counts as written
// unseen, as there; what it hands through unchanged does not.
inline PyObject* call_noted(NotedRegion& region, PyObject* const* given, Py_ssize_t) {
  Session& session = *region.session;
  const std::shared_ptr<Capture> capture = capture_seeing(session);
  const std::atomic<int64_t>* const context = capture ? find_context(*capture) : nullptr;
  if (!context) {
    return Py_NewRef(Py_NotImplemented);
  }
  PyObject* const arguments = given[2];
  PyObject* const list = PyTuple_GET_SIZE(arguments) == 1 ? PyTuple_GET_ITEM(arguments, 0) : arguments;
  std::vector<GivenTensor> tensors;
  if (!(PyList_Check(list) || PyTuple_Check(list)) || !visit_tensors(list, [&](PyObject* value) {
        const at::Tensor& tensor = THPVariable_Unpack(value);
        tensors.push_back({storage_impl(tensor), c10::weak_intrusive_ptr<c10::TensorImpl>(tensor.getIntrusivePtr())});
        return true;
      })) {
    return Py_NewRef(Py_NotImplemented);
  }
  bool waits = false;
  {
    std::lock_guard<std::mutex> lock(session.mutex);
    if (!session.hot.load(std::memory_order_relaxed)) {
      return Py_NewRef(Py_NotImplemented);
    }
    const int64_t now = now_ns();
    const int64_t row[] = {region.signature, context->load(), now - session.began_ns, 0};
    session.rows.add(row);
    waits = session.waits(now);
  }
  const auto mark = [&](PyObject* tensor) {
    mark_written(region, tensor);
    return true;
  };
  if (!region.writes) {
    visit_tensors(list, mark);
  } else {
    for (const size_t index : *region.writes) {
      if (static_cast<Py_ssize_t>(index) < PySequence_Fast_GET_SIZE(list)) {
        visit_tensors(PySequence_Fast_GET_ITEM(list, index), mark);
      }
    }
  }
  py::object results;
  {
    const c10::impl::ExcludeDispatchKeyGuard hidden(kKey);
    const Covered covered(session);
    PyObject* values[] = {given[1], nullptr, nullptr};
    if (PyTuple_GET_SIZE(arguments) == 1) {
      values[1] = list;
      results = checked(PyObject_Vectorcall(given[0], values, 2, nullptr));
    } else {
      const auto all = py::reinterpret_steal<py::object>(
          PySequence_Concat(py::make_tuple(py::reinterpret_borrow<py::object>(given[1])).ptr(), arguments));
      results = checked(PyObject_Call(given[0], all.ptr(), nullptr));
    }
  }
  const auto is_handed_through = [&](c10::StorageImpl* impl) {
    return std::any_of(tensors.begin(), tensors.end(),
                       [impl](const GivenTensor& each) { return each.storage == impl && !each.tensor.expired(); });
  };
  const bool all_seen = visit_tensors(results.ptr(), [&](PyObject* tensor) {
    return is_handed_through(storage_impl(THPVariable_Unpack(tensor))) || mark(tensor);
  });
  if (!all_seen) {  // tensors of other kinds: none of it is taken for handed through
    checked(PyObject_CallOneArg(region.mark.ptr(), results.ptr()));
  }
  if (waits && capture->functions.flush_if_due) {
    call(capture->functions.flush_if_due);
  }
  return results.release().ptr();
}

// ------------------------------------------------------------------------------------- kernels of generated code

// A kernel, or `aten::empty_strided` as generated code calls it.
struct GeneratedKernel {
  std::shared_ptr<Session> session;
  c10::FunctionSchema schema;
  Operator known;
};

// What stands in the place of a function among a generated module's globals.
struct GeneratedCall {
  std::shared_ptr<GeneratedKernel> of;
  py::object kernel;                  // as Python's complete path knows it
  py::object original;                // what generated code would call
  py::object complete;                // Python's complete path, called with the same arguments
  c10::DeviceType device = at::kCPU;  // where a function allocates
  bool pinned = false;
};

inline py::object vectorcall(py::handle function, PyObject* const* given, Py_ssize_t count) {
  return checked(PyObject_Vectorcall(function.ptr(), given, static_cast<size_t>(count), nullptr));
}

// An argument as a stack has it; None where only the complete path takes it.
inline c10::IValue value_of(PyObject* object) {
  if (THPVariable_Check(object)) {
    return THPVariable_Unpack(object);
  }
  if (PyFloat_CheckExact(object)) {
    return PyFloat_AS_DOUBLE(object);
  }
  if (PyLong_CheckExact(object)) {
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(object, &overflow);
    if (!overflow && value >> 32 <= 0) {  // others may be addresses
      return static_cast<int64_t>(value);
    }
  }
  return {};
}

using Values = c10::SmallVector<c10::IValue, 16>;

// The arguments of a kernel; none where only the complete path takes them.
inline std::optional<Values> values_of(const GeneratedKernel& kernel, PyObject* const* given, Py_ssize_t count) {
  Values values;
  for (Py_ssize_t index = 0; index < count; index++) {
    values.push_back(value_of(given[index]));
    if (values.back().isNone()) {
      return std::nullopt;
    }
  }
  return values.size() == kernel.known.integers.size() ? std::optional(std::move(values)) : std::nullopt;
}

// Runs a kernel whose signature is known before it runs, and records that.
inline PyObject* call_kernel(GeneratedCall& call, PyObject* const* given, Py_ssize_t count) {
  const GeneratedKernel& of = *call.of;
  const std::shared_ptr<Capture> capture = capture_seeing(*of.session);
  if (const auto values = capture ? values_of(of, given, count) : std::nullopt) {
    HotRun run(*capture, of.known, of.schema, call.kernel);
    if (run.begins([&](HotCall& made) { return made.take_all(*values) && made.signature() != 0; })) {
      const auto arguments = [&] { return Stack(values->begin(), values->end()); };
      const c10::impl::ExcludeDispatchKeyGuard hidden(kKey);
      py::object result = run.runs([&] { return vectorcall(call.original, given, count); }, arguments);
      run.returned([](HotCall&) { return true; }, arguments, [] { return Stack(); });
      return result.release().ptr();
    }
  }
  return vectorcall(call.complete, given, count).release().ptr();
}

inline bool is_tuple_of_integers(PyObject* object) {
  if (!PyTuple_CheckExact(object)) {
    return false;
  }
  for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(object); index++) {
    if (!PyLong_CheckExact(PyTuple_GET_ITEM(object, index))) {
      return false;
    }
  }
  return true;
}

inline std::vector<int64_t> integers(PyObject* tuple) {
  std::vector<int64_t> found(PyTuple_GET_SIZE(tuple));
  for (size_t index = 0; index < found.size(); index++) {
    found[index] = THPUtils_unpackLong(PyTuple_GET_ITEM(tuple, static_cast<Py_ssize_t>(index)));
  }
  return found;
}

// Allocates memory for generated code, given (sizes, strides, dtype), and records that.
inline PyObject* call_allocator(GeneratedCall& call, PyObject* const* given, Py_ssize_t count) {
  const GeneratedKernel& of = *call.of;
  const std::shared_ptr<Capture> capture = capture_seeing(*of.session);
  if (capture && count == 3 && is_tuple_of_integers(given[0]) && is_tuple_of_integers(given[1]) &&
      THPDtype_Check(given[2])) {
    const std::vector<int64_t> sizes = integers(given[0]), strides = integers(given[1]);
    const std::optional<at::ScalarType> dtype(reinterpret_cast<THPDtype*>(given[2])->scalar_type);
    const std::optional<at::Device> device =
        call.device == at::kCPU ? at::Device(at::kCPU) : c10::impl::getDeviceGuardImpl(call.device)->getDevice();
    HotRun run(*capture, of.known, of.schema, call.kernel);
    if (run.begins([&](HotCall& made) {
          return made.take(at::IntArrayRef(sizes)) && made.take(at::IntArrayRef(strides)) && made.take(dtype) &&
                 made.take(std::optional<at::Layout>()) && made.take(device) && made.take(std::optional(call.pinned));
        })) {
      const auto arguments = [&] { return Stack{sizes, strides, *dtype, c10::IValue(), *device, call.pinned}; };
      const c10::impl::ExcludeDispatchKeyGuard hidden(kKey);
      py::object result = run.runs([&] { return vectorcall(call.original, given, count); }, arguments);
      const at::Tensor& tensor = THPVariable_Unpack(result.ptr());
      run.returned([&](HotCall& made) { return made.take_result(tensor); }, arguments, [&] { return Stack{tensor}; });
      return result.release().ptr();
    }
  }
  return vectorcall(call.complete, given, count).release().ptr();
}

// ------------------------------------------------------------------------------- dispatch keys that a thread is given

struct KeyGuard {
  py::object original;  // (included, excluded): gives the calling thread these sets
};

// Gives the calling thread such sets, in each of them the recorder's key as the thread has it now. Compiled code does
// so at each call: a function of Python here would go through Dynamo.
inline PyObject* guard_keys(KeyGuard& guard, PyObject* const* given, Py_ssize_t count) {
  const auto with_own = [](py::handle keys, bool there) -> py::object {
    if (!py::isinstance<c10::DispatchKeySet>(keys)) {
      return py::reinterpret_borrow<py::object>(keys);  // what is wrong about it is for the original to say
    }
    const uint64_t own = c10::DispatchKeySet(kKey).raw_repr(), raw = py::cast<c10::DispatchKeySet>(keys).raw_repr();
    return ((raw & own) != 0) == there ? py::reinterpret_borrow<py::object>(keys)
                                       : py::cast(c10::DispatchKeySet(c10::DispatchKeySet::RAW, raw ^ own));
  };
  if (count != 2) {
    return vectorcall(guard.original, given, count).release().ptr();
  }
  const py::object included = with_own(given[0], c10::impl::tls_is_dispatch_key_included(kKey));
  const py::object excluded = with_own(given[1], c10::impl::tls_is_dispatch_key_excluded(kKey));
  PyObject* const sets[] = {included.ptr(), excluded.ptr()};
  return vectorcall(guard.original, sets, 2).release().ptr();
}

// ------------------------------------------------------------------------------------------------------ from Python

inline py::object key_guard(py::object original) {
  return callable<KeyGuard, guard_keys>(std::make_unique<KeyGuard>(KeyGuard{std::move(original)}), "key_guard");
}

inline py::object noted_region(std::shared_ptr<Session> session, int64_t signature,
                               std::optional<std::vector<size_t>> writes, py::object mark) {
  auto made =
      std::make_unique<NotedRegion>(NotedRegion{std::move(session), signature, std::move(writes), std::move(mark)});
  return callable<NotedRegion, call_noted>(std::move(made), "noted_region");
}

// A kernel of generated code, described by its schema and the settings that it may depend on. It does not read memory
// that generated code has just allocated before it has written it.
inline std::shared_ptr<GeneratedKernel> generated_kernel(std::shared_ptr<Session> session, const std::string& schema,
                                                         std::vector<size_t> writes, std::vector<size_t> watches) {
  auto made = std::make_shared<GeneratedKernel>(GeneratedKernel{session, torch::jit::parseSchema(schema), {}});
  Operator& known = made->known;
  known.plain = true;
  known.writes = std::move(writes);
  known.watches = std::move(watches);
  known.of_generated_code = true;
  std::lock_guard<std::mutex> lock(session->mutex);
  known.number = --session->last_generated;
  read_schema(known, *session, made->schema);
  return made;
}

// Remember the signature that Python gave a call.
inline void learn_kernel(const GeneratedKernel& of, const py::tuple& given, int64_t signature) {
  const auto values =
      values_of(of, reinterpret_cast<PyTupleObject*>(given.ptr())->ob_item, static_cast<Py_ssize_t>(given.size()));
  std::lock_guard<std::mutex> lock(of.session->mutex);
  HotCall made(*of.session, of.known, true);
  if (values && made.take_all(*values)) {
    of.session->signatures.emplace(made.key(), signature);
  }
}

inline py::object kernel_caller(std::shared_ptr<GeneratedKernel> of, py::object kernel, py::object original,
                                py::object complete) {
  auto made = std::make_unique<GeneratedCall>(
      GeneratedCall{std::move(of), std::move(kernel), std::move(original), std::move(complete)});
  return callable<GeneratedCall, call_kernel>(std::move(made), "kernel");
}

// None where no capture is in progress.
inline py::object allocator(std::shared_ptr<Session> session, py::object kernel, py::object original,
                            py::object complete, const std::string& device, bool pinned) {
  const std::shared_ptr<Capture> capture = capture_in_progress();
  if (!capture || capture->session != session) {
    return py::none();
  }
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::empty_strided", "");
  auto of =
      std::make_shared<GeneratedKernel>(GeneratedKernel{session, op.schema(), described(op, op.schema(), *capture)});
  of->known.generated = true;
  auto made = std::make_unique<GeneratedCall>(GeneratedCall{std::move(of), std::move(kernel), std::move(original),
                                                            std::move(complete), at::Device(device).type(), pinned});
  return callable<GeneratedCall, call_allocator>(std::move(made), "allocator");
}

}  // namespace opreplay
