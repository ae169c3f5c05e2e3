//! What a key may be. Every store checks with these, so that a key that works on one works on all.
//!
//! A key is a relative path: names with `/` between. It never leaves the store, on any kind of store, because `.`,
//! `..` and empty names are refused here, before anything is opened.

use forebay_error::{Code, Error, Result};

/// Most bytes of a key: what S3 allows, and less than PATH_MAX.
pub const KEY_BYTES_MAX: usize = 1024;
/// Most bytes of one name in a key: NAME_MAX of Linux.
pub const NAME_BYTES_MAX: usize = 255;

/// Names of temporary objects start so. They are in the folder of what they are to become, and whoever finds one that
/// is old (no write takes an hour) may remove it.
pub const TEMP_PREFIX: &str = ".forebay-tmp-";
/// The folder of records that are no objects of a checkpoint.
pub const RECORDS_FOLDER: &str = ".forebay";
/// In a records folder: what writers lock, and what tells the time. No objects: listings leave them out.
pub(crate) const RESERVED_NAMES: [&str; 3] = ["lock", "lock-claim", "clock"];

/// Whether a key is of an object that a store writes before it gives it its real key. One that stays is left over from
/// a writer that was killed.
pub fn is_temp(key: &str) -> bool {
    key.rsplit('/').next().is_some_and(|name| name.starts_with(TEMP_PREFIX))
}

/// Whether a store keeps this for itself.
pub(crate) fn is_reserved(key: &str) -> bool {
    let mut names = key.rsplit('/');
    let (name, folder) = (names.next().unwrap_or(""), names.next().unwrap_or(""));
    folder == RECORDS_FOLDER && RESERVED_NAMES.contains(&name)
}

/// Errors: `unsafe_path` for what is no key or a name of the store's own.
pub fn check_key(key: &str) -> Result<()> {
    if key.len() > KEY_BYTES_MAX {
        return refuse(key, "a key is too long");
    }
    for name in key.split('/') {
        match name {
            "" | "." | ".." => return refuse(key, "a key is made of names with one `/` between"),
            name if name.len() > NAME_BYTES_MAX => return refuse(key, "a name is too long"),
            name if name.contains('\0') => return refuse(key, "a name has a NUL in it"),
            _ => {}
        }
    }
    if is_reserved(key) {
        return refuse(key, "the store keeps this name for itself");
    }
    Ok(())
}

/// Errors: `unsafe_path` for what is no prefix: empty, or a key with `/` after it.
pub fn check_prefix(prefix: &str) -> Result<()> {
    match prefix.strip_suffix('/') {
        Some(key) => check_key(key),
        None if prefix.is_empty() => Ok(()),
        None => refuse(prefix, "a prefix is empty or ends in `/`"),
    }
}

fn refuse(key: &str, why: &str) -> Result<()> {
    let mut shown: String = key.chars().take(80).flat_map(char::escape_debug).collect();
    if shown.len() < key.len() {
        shown.push('…');
    }
    Err(Error::new(Code::UnsafePath, why).at(format!("`{shown}`")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn keys_never_leave_the_store() {
        for bad in ["", "/", "/a", "a/", "a//b", ".", "..", "a/../b", "a/.", "a\0b"] {
            assert_eq!(check_key(bad).unwrap_err().code(), Code::UnsafePath, "{bad:?}");
        }
        assert!(check_key(&"n".repeat(NAME_BYTES_MAX + 1)).is_err());
        assert!(check_key(&"n/".repeat(KEY_BYTES_MAX)).is_err());
        for good in ["a", ".metadata", "step-1/.forebay/part-0", "..a", "a b/ü"] {
            check_key(good).unwrap();
        }
    }

    #[test]
    fn names_of_the_store_are_no_keys() {
        for bad in [".forebay/lock", "step-1/.forebay/clock", ".forebay/lock-claim"] {
            assert!(check_key(bad).is_err(), "{bad}");
        }
        for good in ["lock", "step-1/clock", ".forebay/locks"] {
            check_key(good).unwrap();
        }
    }

    #[test]
    fn prefixes_are_folders() {
        check_prefix("").unwrap();
        check_prefix("a/b/").unwrap();
        for bad in ["a", "/", "a//", "../"] {
            assert!(check_prefix(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn temporary_objects_are_known_by_their_name() {
        assert!(is_temp("step-1/.forebay-tmp-0123"));
        assert!(!is_temp(".forebay-tmp-x/data"));
    }

    proptest! {
        #[test]
        fn an_accepted_key_stays_below_its_root(key in "[a./\\\\\0]{0,12}") {
            if check_key(&key).is_ok() {
                let path = std::path::Path::new(&key);
                let plain = |c| matches!(c, std::path::Component::Normal(_));
                prop_assert!(path.components().all(plain));
                prop_assert_eq!(path.components().count(), key.split('/').count());
            }
        }
    }
}
