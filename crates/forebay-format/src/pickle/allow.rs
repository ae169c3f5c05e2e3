//! Which functions and classes a pickle may call: those whose calls the readers of this crate understand.
//!
//! Being on a list means that a call is *noted* without complaint; nothing is called either way.

/// What to do with a call of something that is not on the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unknown {
    /// The error `forbidden_global`.
    Refuse,
    /// A node for which [`Graph::forbidden`](super::Graph::forbidden) has a reason.
    Opaque,
}

/// Names by module.
type Names = &'static [(&'static str, &'static [&'static str])];

/// A list of what may be called.
#[derive(Clone, Copy, Debug)]
pub struct Allow {
    names: &'static [Names],
    unknown: Unknown,
}

impl Allow {
    /// A list of (module, names), and what to do with the rest.
    pub const fn new(names: &'static [Names], unknown: Unknown) -> Self {
        Self { names, unknown }
    }

    /// Whether a call of this name is understood.
    pub fn permits(&self, module: &str, name: &str) -> bool {
        self.names
            .iter()
            .flat_map(|names| names.iter())
            .any(|(listed, names)| *listed == module && names.contains(&name))
    }

    /// What to do with others.
    pub fn unknown(&self) -> Unknown {
        self.unknown
    }
}

/// What `.metadata` calls: torch 2.3 and newer, torch up to 2.2 (the enum had another place), paths as Python up to
/// 3.12 and from 3.13 on spells them, plain containers.
const METADATA_NAMES: Names = &[
    ("torch", &["Size", "device"]),
    ("torch.serialization", &["_get_layout"]),
    ("torch.distributed.checkpoint.metadata", &["_MEM_FORMAT_ENCODING"]),
    ("torch.distributed._shard.sharded_tensor.metadata", &["MEM_FORMAT_ENCODING"]),
    ("pathlib", PATHS),
    ("pathlib._local", PATHS),
    ("collections", &["OrderedDict"]),
];

const PATHS: &[&str] =
    &["Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath"];

/// What the items of torch archives call besides: builders of tensors and parameters, and `_codecs.encode`, which is
/// how protocol 2 spells bytes.
const ITEM_NAMES: Names = &[
    (
        "torch._utils",
        &["_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter"],
    ),
    ("_codecs", &["encode"]),
    ("builtins", BUILTINS),
    ("__builtin__", BUILTINS),
];

/// Containers and numbers that protocols below 4 call by name.
const BUILTINS: &[&str] = &["set", "frozenset", "bytearray", "complex", "slice", "range"];

/// The list for `.metadata`; all else is refused.
pub const DCP_METADATA: Allow = Allow::new(&[METADATA_NAMES], Unknown::Refuse);

/// The list for `data.pkl` of torch archives; all else becomes opaque.
pub const TORCH_ITEM: Allow = Allow::new(&[METADATA_NAMES, ITEM_NAMES], Unknown::Opaque);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_count_with_their_module() {
        assert!(DCP_METADATA.permits("pathlib._local", "PosixPath"));
        assert!(!DCP_METADATA.permits("posix", "Size"));
        assert!(!DCP_METADATA.permits("torch", "load"));
        assert!(!DCP_METADATA.permits("torch._utils", "_rebuild_tensor_v2"));
        assert!(TORCH_ITEM.permits("torch._utils", "_rebuild_tensor_v2"));
        assert!(!TORCH_ITEM.permits("builtins", "eval"));
    }
}
