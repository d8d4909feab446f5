// Tables of what is looked at in every step, made once: a look is one pass over them, however large the model, without
// Python in between. All of them hold what they were made of, so that an address belongs to the same object for as long
// as it is compared. Called with the GIL held.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <string>
#include <utility>
#include <vector>

#include "glance.h"

namespace flashrecovery {

// A strong reference without pybind's overhead.
class Held {
 public:
  explicit Held(PyObject* object) : object_(object) { Py_XINCREF(object_); }
  Held(Held&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  Held& operator=(Held&&) = delete;
  ~Held() { Py_XDECREF(object_); }

  PyObject* get() const { return object_; }
  void replace(PyObject* object) {
    Py_XINCREF(object);
    PyObject* before = std::exchange(object_, object);
    Py_XDECREF(before);
  }

 private:
  PyObject* object_;
};

// What a Python tensor has inside. Only its address is kept: swap_tensors() refuses tensors to which there are references.
inline c10::TensorImpl* implOf(const Held& tensor) { return THPVariable_Unpack(tensor.get()).unsafeGetTensorImpl(); }

inline const at::Tensor& tensorOf(PyObject* object) {
  TORCH_CHECK(THPVariable_Check(object), "not a tensor");
  return THPVariable_Unpack(object);
}

// The version counters of some tensors.
class TensorTable {
 public:
  explicit TensorTable(const py::list& tensors) {
    for (const auto& tensor : tensors) {
      tensors_.emplace_back(tensor.ptr());
      tensorOf(tensor.ptr());
    }
  }

  // A number that changes when one of them is written to, or gets the inside of another one (swap_tensors).
  uint64_t digest() const {
    uint64_t seen = 0x9e3779b97f4a7c15ull;
    const auto mix = [&](uint64_t value) { seen = (seen ^ value) * 0xff51afd7ed558ccdull, seen ^= seen >> 32; };
    const size_t count = tensors_.size();
    for (size_t i = 0; i < count; ++i) {
      if (i + 2 * kAhead < count) __builtin_prefetch(tensors_[i + 2 * kAhead].get());
      if (i + kAhead < count) __builtin_prefetch(implOf(tensors_[i + kAhead]));
      auto* impl = implOf(tensors_[i]);
      mix(reinterpret_cast<uintptr_t>(impl));
      if (!impl->is_inference()) mix(impl->version_counter().current_version());
    }
    return seen;
  }

 private:
  static constexpr size_t kAhead = 8;
  std::vector<Held> tensors_;
};

// Parameters that are found anew at each look: `(owner, name)` for an attribute, or the tensor itself.
class ParameterTable {
 public:
  explicit ParameterTable(const py::list& places) {
    for (const auto& place : places) {
      if (py::isinstance<py::tuple>(place)) {
        const auto pair = py::reinterpret_borrow<py::tuple>(place);
        PyObject* name = pair[1].ptr();
        Py_INCREF(name);
        PyUnicode_InternInPlace(&name);
        places_.push_back({Held(pair[0].ptr()), Held(name)});
        Py_DECREF(name);
      } else {
        tensorOf(place.ptr());
        places_.push_back({Held(place.ptr()), Held(nullptr)});
      }
    }
  }

  // A byte each: whether it requires a gradient.
  py::bytes trained() const {
    std::string flags;
    flags.reserve(places_.size());
    each([&](const at::Tensor& tensor) { flags.push_back(tensor.requires_grad() ? 1 : 0); });
    return flags;
  }

  size_t gradients() const {
    size_t count = 0;
    each([&](const at::Tensor& tensor) { count += tensor.grad().defined(); });
    return count;
  }

 private:
  struct Place {
    Held owner, name;
  };

  template <typename Look>
  void each(const Look& look) const {
    for (const auto& place : places_) {
      if (!place.name.get()) {
        look(THPVariable_Unpack(place.owner.get()));
        continue;
      }
      const auto found = py::reinterpret_steal<py::object>(PyObject_GetAttr(place.owner.get(), place.name.get()));
      if (!found) throw py::error_already_set();
      look(tensorOf(found.ptr()));
    }
  }

  std::vector<Place> places_;
};

// Values in dictionaries, and how many entries other dictionaries have.
class ItemTable {
 public:
  // `numbers`: values of other types are not held; that one of them becomes another of the same type does not matter.
  ItemTable(const py::list& items, const py::list& sized, bool numbers) : numbers_(numbers) {
    for (const auto& item : items) {
      const auto pair = py::reinterpret_borrow<py::tuple>(item);
      TORCH_CHECK(PyDict_Check(pair[0].ptr()), "not a dictionary");
      items_.push_back({Held(pair[0].ptr()), Held(pair[1].ptr()), Held(nullptr), nullptr, nullptr});
    }
    for (const auto& one : sized) {
      TORCH_CHECK(PyDict_Check(one.ptr()), "not a dictionary");
      sized_.push_back({Held(one.ptr()), -1});
    }
  }

  // Whether a value is another object than at the last call, or there are more or fewer entries. True at the first one.
  bool changed() {
    bool found = !looked_;
    looked_ = true;
    for (auto& one : sized_) {
      const auto size = PyDict_Size(one.dict.get());
      found |= size != one.size;
      one.size = size;
    }
    for (auto& item : items_) {
      PyObject* value = valueOf(item);
      const PyTypeObject* type = value ? Py_TYPE(value) : nullptr;
      if (value == item.seen && type == item.type) continue;
      found = true;
      item.seen = value;
      item.type = type;
      item.held.replace(!numbers_ || isNumber(value) ? value : nullptr);
    }
    return found;
  }

  // As glanceAtTensors() of the values, which are tensors or None.
  uint64_t tensors(size_t compared) const {
    std::vector<at::Tensor> found;
    found.reserve(items_.size());
    for (const auto& item : items_) {
      PyObject* value = valueOf(item);
      found.push_back(value && THPVariable_Check(value) ? THPVariable_Unpack(value) : at::Tensor());
    }
    return glanceAtTensors(found, compared);
  }

 private:
  struct Item {
    Held dict, key, held;
    const PyObject* seen;
    const PyTypeObject* type;
  };

  static PyObject* valueOf(const Item& item) {
    PyObject* value = PyDict_GetItemWithError(item.dict.get(), item.key.get());
    if (!value && PyErr_Occurred()) throw py::error_already_set();
    return value;
  }

  static bool isNumber(PyObject* value) {
    return value && (value == Py_None || PyLong_CheckExact(value) || PyFloat_CheckExact(value) || PyBool_Check(value) || PyUnicode_CheckExact(value));
  }

  struct Sized {
    Held dict;
    Py_ssize_t size;
  };
  std::vector<Item> items_;
  std::vector<Sized> sized_;
  bool numbers_, looked_ = false;
};

// What the tensors of shards are found through, and where their memory is.
class StructureTable {
 public:
  // `attributes`: (owner, name, value). `states`: dictionaries of dictionaries (optimizer.state). `tensors`: (tensor,
  // its local tensor or None): of a DTensor, the one in `_local_tensor`.
  StructureTable(const py::list& attributes, const py::list& states, const py::list& tensors) {
    for (const auto& attribute : attributes) {
      const auto parts = py::reinterpret_borrow<py::tuple>(attribute);
      attributes_.push_back({Held(parts[0].ptr()), Held(parts[1].ptr()), Held(parts[2].ptr())});
    }
    for (const auto& state : states) {
      TORCH_CHECK(PyDict_Check(state.ptr()), "not a dictionary");
      states_.push_back(Entries(state.ptr(), true));
    }
    for (const auto& tensor : tensors) {
      const auto pair = py::reinterpret_borrow<py::tuple>(tensor);
      PyObject* local = pair[1].is_none() ? nullptr : pair[1].ptr();
      const auto& outer = tensorOf(pair[0].ptr());
      const auto& inner = tensorOf(local ? local : pair[0].ptr());
      tensors_.push_back({Held(pair[0].ptr()), Held(local), outer.unsafeGetTensorImpl(), inner.unsafeGetTensorImpl(), memoryOf(inner)});
    }
  }

  // Whether the same objects are all that there is, in the same memory.
  bool same() const {
    for (const auto& one : attributes_) {
      const auto found = py::reinterpret_steal<py::object>(PyObject_GetAttr(one.owner.get(), one.name.get()));
      if (!found) {
        PyErr_Clear();
        return false;
      }
      if (found.ptr() != one.value.get()) return false;
    }
    for (const auto& state : states_)
      if (!state.same()) return false;
    const size_t count = tensors_.size();
    for (size_t i = 0; i < count; ++i) {
      if (i + kAhead < count) __builtin_prefetch(implOf(tensors_[i + kAhead].object));
      if (!inPlace(tensors_[i])) return false;
    }
    return true;
  }

 private:
  static constexpr size_t kAhead = 8;

  struct Attribute {
    Held owner, name, value;
  };

  struct Memory {
    const void* storage = nullptr;
    const void* data = nullptr;
    int64_t offset = 0;
    at::ScalarType dtype = at::ScalarType::Undefined;
    std::vector<int64_t> sizes;

    bool operator==(const Memory& other) const = default;
  };

  struct Placed {
    Held object, local;
    const c10::TensorImpl *outer, *inner;
    Memory memory;
  };

  // The entries of a dictionary in their order; of a dictionary of dictionaries, also those of each.
  struct Entries {
    Held dict;
    std::vector<std::pair<Held, Held>> entries;
    std::vector<Entries> inner;

    Entries(PyObject* found, bool nested) : dict(found) {
      PyObject *key, *value;
      Py_ssize_t at = 0;
      while (PyDict_Next(found, &at, &key, &value)) {
        entries.emplace_back(Held(key), Held(value));
        if (nested && PyDict_Check(value)) inner.push_back(Entries(value, false));
      }
    }

    bool same() const {
      if (PyDict_Size(dict.get()) != static_cast<Py_ssize_t>(entries.size())) return false;
      PyObject *key, *value;
      Py_ssize_t at = 0;
      for (const auto& [known, held] : entries)
        if (!PyDict_Next(dict.get(), &at, &key, &value) || key != known.get() || value != held.get()) return false;
      for (const auto& one : inner)
        if (!one.same()) return false;
      return true;
    }
  };

  static const at::StorageImpl* storageOf(const at::Tensor& tensor) {
    return tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
  }

  static Memory memoryOf(const at::Tensor& tensor) {
    const auto* storage = storageOf(tensor);
    return {storage, storage ? storage->data() : nullptr, tensor.storage_offset(), tensor.scalar_type(), tensor.sizes().vec()};
  }

  static bool isAt(const at::Tensor& tensor, const Memory& memory) {
    const auto* storage = storageOf(tensor);
    return storage == memory.storage && (storage ? storage->data() : nullptr) == memory.data &&
           tensor.storage_offset() == memory.offset && tensor.scalar_type() == memory.dtype && tensor.sizes() == memory.sizes;
  }

  static bool inPlace(const Placed& one) {
    const auto& outer = THPVariable_Unpack(one.object.get());
    if (outer.unsafeGetTensorImpl() != one.outer) return false;
    if (!one.local.get()) return isAt(outer, one.memory);
    static PyObject* const name = PyUnicode_InternFromString("_local_tensor");
    const auto found = py::reinterpret_steal<py::object>(PyObject_GetAttr(one.object.get(), name));
    if (!found) {
      PyErr_Clear();
      return false;
    }
    if (found.ptr() != one.local.get()) return false;
    const auto& inner = THPVariable_Unpack(found.ptr());
    return inner.unsafeGetTensorImpl() == one.inner && isAt(inner, one.memory);
  }

  std::vector<Attribute> attributes_;
  std::vector<Entries> states_;
  std::vector<Placed> tensors_;
};

// A table as an opaque object of Python's.
template <typename Table>
py::capsule kept(Table* table) {
  return py::capsule(table, [](void* pointer) { delete static_cast<Table*>(pointer); });
}

template <typename Table>
Table& of(const py::capsule& capsule) {
  return *capsule.get_pointer<Table>();
}

}  // namespace flashrecovery
