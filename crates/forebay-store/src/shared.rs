//! Stores that a process opens again and again, kept: connections, what a store was found to honour, and what rates it
//! was seen to take are worth more than the few objects that hold them.
//!
//! Two openings are the same where URL, settings and all variables that a provider's client reads are. A child of a
//! fork opens its own: the threads that drive its parent's connections do not exist in it. One that was refused for its
//! credentials is opened anew: they may be others by now.

use std::collections::HashMap;
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use forebay_error::Result;

use crate::bucket::{ObjectStore, Place, StoreSettings, open_store};
use crate::store::Store;

/// The most buckets and prefixes that are kept; beyond, all are let go and opened anew.
const KEPT_MAX: usize = 64;

/// Whose values a client may have been made of.
const VARIABLES: [&str; 7] =
    ["AWS_", "GOOGLE_", "GCS_", "AZURE_", "STORAGE_EMULATOR_HOST", "SSL_CERT_", "HOME"];

/// By process, URL, and a hash of settings and variables: the values hold secrets, which are not kept.
type Key = (u32, String, u64);

static KEPT: Mutex<Option<HashMap<Key, Arc<ObjectStore>>>> = Mutex::new(None);

/// The folder that a path or a `file:` URL names; `None` where it is the URL of a bucket (or `memory:`, or of a place
/// on a node).
///
/// Errors: `usage` for other URLs, `unsafe_path` for a prefix that is none.
pub fn local_path(url: &str) -> Result<Option<PathBuf>> {
    Ok(match Place::parse(url)? {
        Place::Folder(path) => Some(path),
        Place::Bucket { .. } | Place::Memory { .. } | Place::Split { .. } => None,
    })
}

/// As [`open_store`]; a bucket that this process has open already is that one.
pub fn shared_store(url: &str, settings: &StoreSettings) -> Result<Arc<dyn Store>> {
    // What has a folder in it is opened anew: another may be there by now.
    if matches!(Place::parse(url)?, Place::Folder(_) | Place::Split { .. }) {
        return open_store(url, settings);
    }
    let key = (std::process::id(), url.to_owned(), fingerprint(settings));
    if let Some(store) = with_kept(|kept| usable(kept, &key)) {
        return Ok(store);
    }
    // Not under the lock: in a child that is forked meanwhile nobody would ever release it.
    let opened = Arc::new(ObjectStore::open(url, settings)?);
    Ok(with_kept(|kept| {
        // All use that of who was faster.
        if let Some(store) = usable(kept, &key) {
            return store;
        }
        if kept.len() >= KEPT_MAX {
            kept.clear();
        }
        kept.insert(key, opened.clone());
        opened
    }))
}

fn with_kept<R>(action: impl FnOnce(&mut HashMap<Key, Arc<ObjectStore>>) -> R) -> R {
    let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    action(kept.get_or_insert_with(HashMap::new))
}

fn usable(kept: &HashMap<Key, Arc<ObjectStore>>, key: &Key) -> Option<Arc<ObjectStore>> {
    kept.get(key).filter(|store| !store.is_refused()).cloned()
}

fn fingerprint(settings: &StoreSettings) -> u64 {
    let mut hasher = DefaultHasher::new();
    format!("{settings:?}").hash(&mut hasher);
    let is_read = |name: &str| VARIABLES.iter().any(|start| name.starts_with(start));
    let mut variables: Vec<_> =
        std::env::vars_os().filter(|(name, _)| name.to_str().is_some_and(is_read)).collect();
    variables.sort();
    variables.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_is_opened_once_for_one_way_to_reach_it() {
        let settings = StoreSettings {
            endpoint: Some("http://127.0.0.1:1".to_owned()),
            region: Some("here".to_owned()),
            ..StoreSettings::default()
        };
        let open = |settings: &StoreSettings| shared_store("s3://kept/a", settings).unwrap();
        let same = |a: &Arc<dyn Store>, b: &Arc<dyn Store>| {
            std::ptr::addr_eq(&raw const **a, &raw const **b)
        };
        let first = open(&settings);
        assert!(same(&first, &open(&settings)));
        let other = StoreSettings { region: Some("there".to_owned()), ..settings };
        assert!(!same(&first, &open(&other)));
    }

    #[test]
    fn paths_and_buckets_are_told_apart() {
        assert_eq!(local_path("file:///a/b").unwrap(), Some(PathBuf::from("/a/b")));
        assert_eq!(local_path("run:7/x").unwrap(), Some(PathBuf::from("run:7/x")));
        assert_eq!(local_path("s3://b/x").unwrap(), None);
        assert_eq!(local_path("memory:x").unwrap(), None);
        assert!(local_path("ftp://b/x").is_err());
    }

    #[test]
    fn memory_of_one_name_is_one_place_in_this_process() {
        let settings = StoreSettings::default();
        let open = |url: &str| ObjectStore::open(url, &settings).unwrap();
        open("memory:here/a").put("b", b"1").unwrap();
        assert_eq!(
            open("memory:here").get("a/b", 9).unwrap().map(|found| found.0),
            Some(vec![b'1'])
        );
        assert_eq!(open("memory:there").get("a/b", 9).unwrap(), None);
        open("memory:").put("b", b"1").unwrap();
        assert_eq!(open("memory:").get("b", 9).unwrap(), None);
    }
}
