//! The stable codes. Adding one is a minor change; renaming or removing one breaks users.

use std::io;

/// Whose turn it is, which also decides the exit code of the command (usage: 2, all else: 1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Category {
    /// The call or the command line is wrong.
    Usage,
    /// The data is damaged or breaks its format.
    Data,
    /// The machine, its files, memory or devices said no.
    System,
    /// A fault of Forebay's own.
    Internal,
}

macro_rules! codes {
    ($($(#[doc = $doc:literal])+ $variant:ident = $name:literal, $category:ident;)+) => {
        /// A stable error code. The text of each is what `error[code]` shows and what Python carries as `.code`.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Code {
            $($(#[doc = $doc])+ $variant,)+
        }

        impl Code {
            /// Every code.
            pub const ALL: &[Code] = &[$(Code::$variant,)+];

            /// The text of the code.
            pub fn as_str(self) -> &'static str {
                match self { $(Code::$variant => $name,)+ }
            }

            /// Whose turn it is.
            pub fn category(self) -> Category {
                match self { $(Code::$variant => Category::$category,)+ }
            }
        }
    };
}

codes! {
    /// A field of a header entry is missing, of the wrong type or out of range.
    BadField = "bad_field", Data;
    /// The text metadata of a header is not a map of text to text.
    BadMetadata = "bad_metadata", Data;
    /// A name occurs twice in one JSON object.
    DuplicateKey = "duplicate_key", Data;
    /// A tensor lies in two files and nothing says which one counts.
    DuplicateTensor = "duplicate_tensor", Data;
    /// The length word of a header is above the cap of 100,000,000 bytes.
    HeaderTooLarge = "header_too_large", Data;
    /// The index of a sharded model is not JSON or lacks a usable `weight_map`.
    InvalidIndex = "invalid_index", Data;
    /// A header is not JSON.
    InvalidJson = "invalid_json", Data;
    /// A header is not UTF-8.
    InvalidUtf8 = "invalid_utf8", Data;
    /// A sub-byte tensor or slice does not end on a byte.
    Misaligned = "misaligned", Data;
    /// A file that the index names is not there.
    MissingShard = "missing_shard", Data;
    /// A header is JSON but not an object.
    NotAnObject = "not_an_object", Data;
    /// Bytes between tensors belong to none.
    OffsetHole = "offset_hole", Data;
    /// Two tensors share bytes.
    OffsetOverlap = "offset_overlap", Data;
    /// A tensor ends before it starts.
    OffsetsReversed = "offsets_reversed", Data;
    /// A tensor ends past the end of its file.
    OutOfBounds = "out_of_bounds", Data;
    /// A size does not fit 64 bits.
    Overflow = "overflow", Data;
    /// A shape and its byte range disagree.
    ShapeSizeMismatch = "shape_size_mismatch", Data;
    /// The index gives a tensor to a file that does not hold it.
    TensorNotInShard = "tensor_not_in_shard", Data;
    /// Bytes follow the last tensor.
    TrailingBytes = "trailing_bytes", Data;
    /// A file is shorter than it must be.
    Truncated = "truncated", Data;
    /// A dtype that is not in the format.
    UnknownDtype = "unknown_dtype", Data;
    /// A path leaves its folder.
    UnsafePath = "unsafe_path", Data;
    /// What is there is in no format that Forebay reads.
    UnknownFormat = "unknown_format", Data;
    /// A checksum given by the caller or the file does not match the bytes.
    Checksum = "checksum", Data;
    /// A file changed while it was being read.
    FileChanged = "file_changed", Data;
    /// A checkpoint was never committed: its data may be there, the file that makes it count is not.
    NotCommitted = "not_committed", Data;
    /// The metadata of a checkpoint cannot be read or contradicts itself.
    InvalidMetadata = "invalid_metadata", Data;
    /// A pickle names a function or class that is not on the list of harmless ones.
    ForbiddenGlobal = "forbidden_global", Data;
    /// Two pieces of one tensor cover the same elements.
    Overlap = "overlap", Data;
    /// Elements of a tensor that no piece covers.
    Hole = "hole", Data;
    /// A data file that the metadata names is not there.
    MissingFile = "missing_file", Data;
    /// A stored item is not the archive it should be, or its parts contradict each other.
    InvalidItem = "invalid_item", Data;

    /// The call or command line is wrong.
    Usage = "usage", Usage;
    /// No tensor of that name.
    NoSuchTensor = "no_such_tensor", Usage;
    /// A slice or region does not fit the tensor.
    BadSlice = "bad_slice", Usage;
    /// A destination has another shape than the tensor.
    ShapeMismatch = "shape_mismatch", Usage;
    /// A destination has another dtype than the tensor and no cast was asked for.
    DtypeMismatch = "dtype_mismatch", Usage;
    /// What was saved and what is asked for are built differently: ranks, names, or shapes disagree.
    StructureMismatch = "structure_mismatch", Usage;
    /// Valid, but not supported here; the hint says what is.
    Unsupported = "unsupported", Usage;

    /// No such file or folder.
    NotFound = "not_found", System;
    /// The system denied access.
    PermissionDenied = "permission_denied", System;
    /// The file exists already and must not be replaced.
    AlreadyExists = "already_exists", System;
    /// No space left, or a quota is used up.
    NoSpace = "no_space", System;
    /// Memory could not be had.
    OutOfMemory = "out_of_memory", System;
    /// A change is in place, but could not be forced to the disk: a loss of power may undo it.
    NotDurable = "not_durable", System;
    /// Any other I/O error; the cause names it.
    Io = "io", System;
    /// No such device, or no driver for it.
    NoDevice = "no_device", System;
    /// The device or its driver failed.
    Device = "device", System;
    /// A later writer has taken over the run: this one may not commit any more.
    Fenced = "fenced", System;
    /// Another attempt at the same step was committed first.
    LostCommit = "lost_commit", System;
    /// The ranks of a job do not see each other's files: the storage is not shared.
    NotShared = "not_shared", System;
    /// The operation was cancelled.
    Cancelled = "cancelled", System;
    /// The operation did not end in its time.
    Timeout = "timeout", System;
    /// An object made before a fork was used after it.
    Forked = "forked", System;

    /// A fault of Forebay's own; please report it.
    Internal = "internal", Internal;
}

impl Code {
    pub(crate) fn of_io(error: &io::Error) -> Self {
        use io::ErrorKind as Kind;
        let inside = error.get_ref().and_then(|inside| inside.downcast_ref::<crate::Error>());
        if let Some(inside) = inside {
            return inside.code();
        }
        match error.kind() {
            Kind::NotFound => Code::NotFound,
            Kind::PermissionDenied => Code::PermissionDenied,
            Kind::AlreadyExists => Code::AlreadyExists,
            Kind::StorageFull | Kind::QuotaExceeded => Code::NoSpace,
            Kind::OutOfMemory => Code::OutOfMemory,
            Kind::TimedOut => Code::Timeout,
            _ => Code::Io,
        }
    }
}
