// Tables of what is looked at in every step, made once: a look is one pass over them, however large the model, without
// Python in between. All of them hold what they were made of, so that an address belongs to the same object for as long
// as it is compared. Called with the GIL held.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>

#include <structmember.h>

#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <unordered_map>
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

// Brings the cache line of `address` up before it is read. Nothing is read here: it may be an address of the past.
inline void fetch(const void* address) { __builtin_prefetch(address); }
inline void fetchAll(const void* address, size_t bytes) {
  for (size_t at = 0; at < bytes; at += 64) fetch(static_cast<const char*>(address) + at);
}
constexpr size_t kAhead = 12;

// Another number after each change of a dictionary, never one that any dictionary has had before (PEP 509). 0: this
// interpreter does not tell.
inline uint64_t versionOf(PyObject* dict) {
#if PY_VERSION_HEX < 0x030D0000
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
  return reinterpret_cast<PyDictObject*>(dict)->ma_version_tag;
#pragma GCC diagnostic pop
#else
  (void)dict;
  return 0;
#endif
}

// A dictionary, and whether it is as it was when it was last said to be known.
class Dict {
 public:
  explicit Dict(PyObject* dict) : dict_(dict) { TORCH_CHECK(!dict || PyDict_Check(dict), "not a dictionary"); }

  PyObject* get() const { return dict_.get(); }
  // Where its version and its size are.
  void fetch() const { flashrecovery::fetch(reinterpret_cast<const char*>(dict_.get()) + sizeof(PyObject)); }
  // Where at() will look if it has changed. To be called some time after fetch().
  void fetchEntry() const {
#if PY_VERSION_HEX < 0x030D0000
    if (unchanged()) return;
    const auto* dict = reinterpret_cast<const PyDictObject*>(dict_.get());
    if (dict->ma_values) {
      flashrecovery::fetch(reinterpret_cast<PyObject* const*>(dict->ma_values) + index_);
      return;
    }
    const auto* keys = reinterpret_cast<const char*>(dict->ma_keys);
    flashrecovery::fetch(keys);
    flashrecovery::fetch(keys + 64);
    flashrecovery::fetch(keys + entry_);
#endif
  }
  // What is looked up in it is `key`. Only where fetchEntry() brings memory up depends on it.
  void expect(PyObject* key) {
#if PY_VERSION_HEX < 0x030D0000
    PyObject *one, *value;
    Py_ssize_t at = 0, index = 0;
    for (; PyDict_Next(dict_.get(), &at, &one, &value) && one != key; ++index) {
    }
    index_ = static_cast<size_t>(index);
    const auto* keys = reinterpret_cast<const uint8_t*>(reinterpret_cast<const PyDictObject*>(dict_.get())->ma_keys);
    constexpr size_t kHeader = 32, kLog2OfIndices = 9, kEntry = 16;  // of a PyDictKeysObject whose keys are texts
    entry_ = kHeader + (size_t{1} << (keys[kLog2OfIndices] & 31)) + kEntry * index_;
#else
    (void)key;
#endif
  }
  bool unchanged() const {
    const auto version = versionOf(dict_.get());
    return version && version == known_;
  }
  void know() { known_ = versionOf(dict_.get()); }
  Py_ssize_t size() const { return PyDict_GET_SIZE(dict_.get()); }
  // Borrowed; null if there is no such key.
  PyObject* at(PyObject* key) const {
    PyObject* value = PyDict_GetItemWithError(dict_.get(), key);
    if (!value && PyErr_Occurred()) throw py::error_already_set();
    return value;
  }

 private:
  Held dict_;
  uint64_t known_ = 0;
  size_t index_ = 0, entry_ = 0;
};

// An attribute of an object. One in the object's dictionary is looked up again when that has changed.
class Attribute {
 public:
  Attribute(PyObject* owner, PyObject* name) : owner_(owner), name_(interned(name)), dict_(dictOf(owner, name_.get())) {
    if (dict_.get()) dict_.expect(name_.get());
  }

  void fetch() const {
    flashrecovery::fetch(slot_);
    if (dict_.get()) dict_.fetch();
  }
  // What find() reads where the dictionary has changed. To be called some time after fetch().
  void fetchEntry() const {
    if (dict_.get()) dict_.fetchEntry();
  }

  // Borrowed until the next call; null if the owner has no such attribute.
  PyObject* find() {
    if (!dict_.get() || !isOwners()) return ask();
    if (dict_.unchanged()) return seen_;
    PyObject* value = dict_.at(name_.get());
    if (!value) return ask();
    seen_ = value;
    dict_.know();
    return value;
  }

 private:
  static Held interned(PyObject* name) {
    Py_INCREF(name);
    PyUnicode_InternInPlace(&name);
    Held held(name);
    Py_DECREF(name);
    return held;
  }

  // The owner's own dictionary where it alone says what the attribute is, else null.
  static PyObject* dictOf(PyObject* owner, PyObject* name) {
#if PY_VERSION_HEX < 0x030D0000
    auto* type = Py_TYPE(owner);
    if (type->tp_getattro != PyObject_GenericGetAttr || _PyType_Lookup(type, name)) return nullptr;
    const auto dict = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(owner, nullptr));
    if (!dict) PyErr_Clear();
    return dict && PyDict_Check(dict.ptr()) && dictAt(_PyObject_GetDictPtr(owner)) == dict.ptr() ? dict.ptr() : nullptr;
#else
    (void)owner, (void)name;
    return nullptr;
#endif
  }

  static PyObject* dictAt(PyObject** slot) { return slot ? *slot : nullptr; }

  // Its dictionary as a whole may be exchanged.
  bool isOwners() const { return slot_ && *slot_ == dict_.get(); }

  PyObject* ask() {
    const auto found = py::reinterpret_steal<py::object>(PyObject_GetAttr(owner_.get(), name_.get()));
    if (!found) PyErr_Clear();
    asked_.replace(found.ptr());
    return found.ptr();
  }

  Held owner_, name_, asked_{nullptr};
  Dict dict_;
#if PY_VERSION_HEX < 0x030D0000
  PyObject** slot_ = dict_.get() ? _PyObject_GetDictPtr(owner_.get()) : nullptr;
#else
  PyObject** slot_ = nullptr;
#endif
  PyObject* seen_ = nullptr;  // what the dictionary has, while it is unchanged
};

// The version counters of some tensors.
class TensorTable {
 public:
  explicit TensorTable(const py::list& tensors) {
    tensors_.reserve(tensors.size());
    for (const auto& tensor : tensors) {
      tensorOf(tensor.ptr());
      tensors_.push_back({Held(tensor.ptr()), nullptr, nullptr});
    }
  }

  // A number that changes when one of them is written to, or gets the inside of another one (swap_tensors).
  uint64_t digest() {
    uint64_t seen = 0x9e3779b97f4a7c15ull;
    const auto mix = [&](uint64_t value) { seen = (seen ^ value) * 0xff51afd7ed558ccdull, seen ^= seen >> 32; };
    const size_t count = tensors_.size();
    for (size_t i = 0; i < count; ++i) {
      if (i + kAhead < count) {
        const auto& next = tensors_[i + kAhead];
        fetch(&THPVariable_Unpack(next.object.get()));
        fetch(next.impl);
        fetch(next.counter);
      }
      auto& one = tensors_[i];
      auto* impl = implOf(one.object);
      const auto& counter = impl->version_counter();
      one.impl = &counter;
      one.counter = addressIn(counter);
      mix(reinterpret_cast<uintptr_t>(impl));
      if (counter.enabled()) mix(counter.current_version());  // an inference tensor has none
    }
    return seen;
  }

 private:
  struct Place {
    Held object;
    const void *impl, *counter;  // where these were at the last look
  };

  static const void* addressIn(const c10::VariableVersion& counter) {
    static_assert(sizeof(counter) == sizeof(void*));
    const void* address;
    std::memcpy(&address, static_cast<const void*>(&counter), sizeof(address));
    return address;
  }

  std::vector<Place> tensors_;
};

// Parameters that are looked up again at each look: `(owner, name)` for an attribute, or the tensor itself.
class ParameterTable {
 public:
  explicit ParameterTable(const py::list& places) {
    places_.reserve(places.size());
    for (const auto& place : places) {
      if (py::isinstance<py::tuple>(place)) {
        const auto pair = py::reinterpret_borrow<py::tuple>(place);
        places_.push_back({Held(nullptr), static_cast<ptrdiff_t>(attributes_.size())});
        attributes_.emplace_back(pair[0].ptr(), pair[1].ptr());
      } else {
        tensorOf(place.ptr());
        places_.push_back({Held(place.ptr()), -1});
      }
    }
    found_ = attributes_.empty();
  }

  // A number that changes when one begins or ceases to require a gradient; equal where the same ones do. `again`: those
  // that were found last are asked, without a look whether there are others now.
  //
  // Not their flags: the first allocation of a kilobyte after a forward pass has glibc merge all small blocks that were
  // freed in it, which takes 0.3 to 1 ms where the look itself takes 0.05.
  uint64_t trained(bool again) {
    uint64_t seen = 0x9e3779b97f4a7c15ull, word = 1;
    const auto mix = [&] { seen = (seen ^ word) * 0xff51afd7ed558ccdull, seen ^= seen >> 32, word = 1; };
    each(again, [&](const Meta* meta) {
      const bool full = word >> 63;
      if (full) mix();
      word = word << 1 | requiresGrad(meta);
    });
    mix();
    return seen;
  }

  // A byte each: whether it requires a gradient.
  py::bytes flags() {
    std::string flags;
    flags.reserve(places_.size());
    each(false, [&](const Meta* meta) { flags.push_back(requiresGrad(meta)); });
    return flags;
  }

  size_t gradients() {
    size_t count = 0;
    each(false, [&](const Meta* meta) { count += meta && meta->grad_.defined(); });
    return count;
  }

 private:
  using Meta = torch::autograd::AutogradMeta;
  struct Place {
    Held tensor;  // that was found last
    ptrdiff_t attribute;  // in which it is to be found, -1: it is always this one
    const void *object = nullptr, *impl = nullptr;  // where these were at the last look
    const Meta* meta = nullptr;
  };

  static bool requiresGrad(const Meta* meta) { return meta && (meta->requires_grad_ || meta->grad_fn_); }

  template <typename Look>
  void each(bool again, const Look& look) {
    if (!again || !found_) find();
    const size_t count = places_.size();
    for (size_t i = 0; i < count; ++i) {
      if (i + kAhead < count) {
        const auto& next = places_[i + kAhead];
        fetch(next.object);
        fetch(next.impl);
        if (next.meta) {
          fetch(&next.meta->grad_);
          fetch(&next.meta->requires_grad_);
        }
      }
      auto& place = places_[i];
      const auto& tensor = tensorOf(place.tensor.get());
      auto* impl = tensor.unsafeGetTensorImpl();
      place.object = &tensor;
      place.impl = reinterpret_cast<const char*>(impl) + kMetaInImpl;
      place.meta = static_cast<const Meta*>(impl->autograd_meta());
      look(place.meta);
    }
  }

  // Looks up those that are attributes.
  void find() {
    const size_t count = places_.size();
    const auto ahead = [&](size_t i, const auto& bring) {
      if (i < count && places_[i].attribute >= 0) bring(attributes_[places_[i].attribute]);
    };
    for (size_t i = 0; i < count && !attributes_.empty(); ++i) {
      ahead(i + 2 * kAhead, [](const Attribute& one) { one.fetch(); });
      ahead(i + kAhead, [](const Attribute& one) { one.fetchEntry(); });
      auto& place = places_[i];
      if (place.attribute < 0) continue;
      PyObject* tensor = attributes_[place.attribute].find();
      if (!tensor) throw py::attribute_error("a parameter is gone");
      if (tensor == place.tensor.get()) continue;
      tensorOf(tensor);
      place.tensor.replace(tensor);
    }
    found_ = true;
  }

  static constexpr size_t kMetaInImpl = 24;  // about there is what says where the meta is
  std::vector<Place> places_;
  std::vector<Attribute> attributes_;
  bool found_;
};

// Values in dictionaries, and how many entries other dictionaries have.
class ItemTable {
 public:
  // `numbers`: values of other types are not held; that one of them becomes another of the same type does not matter.
  ItemTable(const py::list& items, const py::list& sized, bool numbers) : numbers_(numbers) {
    std::unordered_map<PyObject*, size_t> homes;
    const auto home = [&](PyObject* dict) -> Home& {
      const auto [at, is_new] = homes.try_emplace(dict, homes_.size());
      if (is_new) homes_.emplace_back(dict);
      return homes_[at->second];
    };
    for (const auto& item : items) {
      const auto pair = py::reinterpret_borrow<py::tuple>(item);
      home(pair[0].ptr()).items.push_back({Held(pair[1].ptr()), Held(nullptr), nullptr, nullptr});
    }
    for (const auto& one : sized) home(one.ptr()).sized = true;
  }

  // Whether a value is another object than at the last call, or there are more or fewer entries. True at the first one.
  bool changed() {
    bool found = !looked_;
    looked_ = true;
    const size_t count = homes_.size();
    for (size_t i = 0; i < count; ++i) {
      if (i + kAhead < count) homes_[i + kAhead].dict.fetch();
      auto& home = homes_[i];
      if (!home.dict.unchanged()) found |= home.look(numbers_);
    }
    return found;
  }

  // As glanceAtTensors() of the values, which are tensors or None.
  uint64_t tensors(size_t compared) const {
    std::vector<at::Tensor> found;
    for (const auto& home : homes_)
      for (const auto& item : home.items) {
        PyObject* value = home.dict.at(item.key.get());
        found.push_back(value && THPVariable_Check(value) ? THPVariable_Unpack(value) : at::Tensor());
      }
    return glanceAtTensors(found, compared);
  }

 private:
  struct Item {
    Held key, held;
    const PyObject* seen;
    const PyTypeObject* type;
  };

  static bool isNumber(PyObject* value) {
    return value && (value == Py_None || PyLong_CheckExact(value) || PyFloat_CheckExact(value) || PyBool_Check(value) || PyUnicode_CheckExact(value));
  }

  // A dictionary with what is looked at in it.
  struct Home {
    Dict dict;
    std::vector<Item> items;
    Py_ssize_t size = -1;
    bool sized = false;

    explicit Home(PyObject* dict) : dict(dict) {}

    bool look(bool numbers) {
      bool found = sized && size != dict.size();
      size = dict.size();
      dict.know();
      for (auto& item : items) {
        PyObject* value = dict.at(item.key.get());
        const PyTypeObject* type = value ? Py_TYPE(value) : nullptr;
        if (value == item.seen && type == item.type) continue;
        found = true;
        item.seen = value;
        item.type = type;
        item.held.replace(!numbers || isNumber(value) ? value : nullptr);
      }
      return found;
    }
  };

  std::vector<Home> homes_;
  bool numbers_, looked_ = false;
};

// What the tensors of shards are found through, and where their memory is.
class StructureTable {
 public:
  // `attributes`: (owner, name, value). `states`: dictionaries of dictionaries (optimizer.state). `tensors`: (tensor,
  // its local tensor or None): of a DTensor, the one in `_local_tensor`.
  StructureTable(const py::list& attributes, const py::list& states, const py::list& tensors) {
    std::map<std::tuple<PyObject*, std::string, PyObject*>, bool> known;
    for (const auto& attribute : attributes) {
      const auto parts = py::reinterpret_borrow<py::tuple>(attribute);
      if (!known.try_emplace({parts[0].ptr(), parts[1].cast<std::string>(), parts[2].ptr()}, true).second) continue;
      attributes_.push_back({Attribute(parts[0].ptr(), parts[1].ptr()), Held(parts[2].ptr())});
    }
    for (const auto& state : states) addEntries(state.ptr(), true);
    for (const auto& tensor : tensors) {
      const auto pair = py::reinterpret_borrow<py::tuple>(tensor);
      PyObject* local = pair[1].is_none() ? nullptr : pair[1].ptr();
      const auto& outer = tensorOf(pair[0].ptr());
      const auto& inner = tensorOf(local ? local : pair[0].ptr());
      tensors_.push_back({Held(pair[0].ptr()), Held(local), outer.unsafeGetTensorImpl(), inner.unsafeGetTensorImpl(), memoryOf(inner)});
      offsets_.push_back(local ? slotOf(Py_TYPE(pair[0].ptr())) : 0);
    }
  }

  // Whether the same objects are all that there is, in the same memory.
  bool same() {
    const auto ahead = [](auto& table, size_t i, const auto& bring) {
      if (i + kAhead < table.size()) bring(table[i + kAhead]);
    };
    for (size_t i = 0; i < attributes_.size(); ++i) {
      ahead(attributes_, i + kAhead, [](const Known& one) { one.attribute.fetch(); });
      ahead(attributes_, i, [](const Known& one) { one.attribute.fetchEntry(); });
      if (attributes_[i].attribute.find() != attributes_[i].value.get()) return false;
    }
    for (size_t i = 0; i < states_.size(); ++i) {
      ahead(states_, i, [](const Entries& one) { one.dict.fetch(); });
      if (!states_[i].same()) return false;
    }
    for (size_t i = 0; i < tensors_.size(); ++i) {
      if (i + kAhead < tensors_.size()) tensors_[i + kAhead].fetch(offsets_[i + kAhead]);
      if (!inPlace(tensors_[i], offsets_[i])) return false;
    }
    return true;
  }

 private:
  struct Known {
    Attribute attribute;
    Held value;
  };

  struct Memory {
    const void* storage = nullptr;
    const void* data = nullptr;
    int64_t offset = 0;
    uint64_t form = 0;  // of shape, strides and dtype

    bool operator==(const Memory& other) const = default;
  };

  static constexpr size_t kDataInStorage = 16;  // about there a storage says where its memory is
  struct Placed {
    Held object, local;
    const c10::TensorImpl *outer, *inner;
    Memory memory;

    // `offset`: in the object, of what says which one the local tensor is.
    void fetch(Py_ssize_t offset) const {
      flashrecovery::fetch(&THPVariable_Unpack(object.get()));
      if (offset) flashrecovery::fetch(reinterpret_cast<const char*>(object.get()) + offset);
      if (local.get()) flashrecovery::fetch(&THPVariable_Unpack(local.get()));
      fetchAll(inner, sizeof(*inner));
      flashrecovery::fetch(static_cast<const char*>(memory.storage) + kDataInStorage);
    }
  };

  // The entries of a dictionary in their order.
  struct Entries {
    Dict dict;
    std::vector<std::pair<Held, Held>> entries;

    explicit Entries(PyObject* found) : dict(found) {
      PyObject *key, *value;
      Py_ssize_t at = 0;
      while (PyDict_Next(found, &at, &key, &value)) entries.emplace_back(Held(key), Held(value));
      dict.know();
    }

    bool same() {
      if (dict.unchanged()) return true;
      if (dict.size() != static_cast<Py_ssize_t>(entries.size())) return false;
      PyObject *key, *value;
      Py_ssize_t at = 0;
      for (const auto& [known, held] : entries)
        if (!PyDict_Next(dict.get(), &at, &key, &value) || key != known.get() || value != held.get()) return false;
      dict.know();
      return true;
    }
  };

  void addEntries(PyObject* found, bool nested) {
    states_.emplace_back(found);
    PyObject *key, *value;
    Py_ssize_t at = 0;
    while (nested && PyDict_Next(found, &at, &key, &value))
      if (PyDict_Check(value)) addEntries(value, false);
  }

  static const at::StorageImpl* storageOf(const at::Tensor& tensor) {
    return tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
  }

  static Memory memoryOf(const at::Tensor& tensor) {
    const auto* storage = storageOf(tensor);
    uint64_t form = static_cast<uint64_t>(tensor.scalar_type()) + 1;
    const auto mix = [&](int64_t value) { form = (form ^ static_cast<uint64_t>(value)) * 0xff51afd7ed558ccdull, form ^= form >> 29; };
    for (const auto size : tensor.sizes()) mix(size);
    mix(-1);
    if (storage)
      for (const auto stride : tensor.strides()) mix(stride);
    return {storage, storage ? storage->data() : nullptr, tensor.storage_offset(), form};
  }

  static PyObject* localName() {
    static PyObject* const name = PyUnicode_InternFromString("_local_tensor");
    return name;
  }

  // Where objects of the type have `_local_tensor`; 0: not in a slot.
  static Py_ssize_t slotOf(PyTypeObject* type) {
    PyObject* found = type->tp_getattro == PyObject_GenericGetAttr ? _PyType_Lookup(type, localName()) : nullptr;
    if (!found || Py_TYPE(found) != &PyMemberDescr_Type) return 0;
    const auto* member = reinterpret_cast<PyMemberDescrObject*>(found)->d_member;
    return member->type == T_OBJECT_EX ? member->offset : 0;
  }

  static bool inPlace(const Placed& one, Py_ssize_t offset) {
    const auto& outer = THPVariable_Unpack(one.object.get());
    if (outer.unsafeGetTensorImpl() != one.outer) return false;
    if (!one.local.get()) return memoryOf(outer) == one.memory;
    if (offset) {
      if (*reinterpret_cast<PyObject**>(reinterpret_cast<char*>(one.object.get()) + offset) != one.local.get()) return false;
    } else {
      const auto found = py::reinterpret_steal<py::object>(PyObject_GetAttr(one.object.get(), localName()));
      if (!found) PyErr_Clear();
      if (found.ptr() != one.local.get()) return false;
    }
    const auto& inner = THPVariable_Unpack(one.local.get());
    return inner.unsafeGetTensorImpl() == one.inner && memoryOf(inner) == one.memory;
  }

  std::vector<Known> attributes_;
  std::vector<Entries> states_;
  std::vector<Placed> tensors_;
  std::vector<Py_ssize_t> offsets_;
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
