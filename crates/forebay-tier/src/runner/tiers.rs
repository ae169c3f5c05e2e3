//! The tiers as they are configured, and as they are opened.
//!
//! A place that cannot be opened now (a file system that is not mounted, a bucket without credentials) is no reason to
//! stop: it is tried again at every look, and the others go on meanwhile.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use forebay_checkpoint::commit::{Clock, Root, SystemClock};
use forebay_checkpoint::save::OurMetadata;
use forebay_error::{Code, Error, Result};
use forebay_store::{PosixStore, Store, create_split, is_unmade, open_store};

use super::mounted;
use crate::config::{Config, TierConfig};
use crate::hop::Side;
use crate::limits::{Caps, Limits};
use crate::policy::{Keep, Rules, TierRules};

/// All tiers, the nearest first.
pub struct Tiers {
    pub(crate) config: Config,
    pub(crate) tiers: Vec<Tier>,
    pub(crate) clock: Arc<dyn Clock>,
    /// Host and process.
    pub(crate) who: String,
    /// Whose they are, for the log, where a process has those of several jobs.
    pub(crate) job: Option<String>,
}

/// One of them.
pub(crate) struct Tier {
    pub(crate) config: TierConfig,
    pub(crate) limits: Arc<Limits>,
    /// The folder, where it is one (a node's, of what is on several): for its free space, and as the source of an
    /// export.
    pub(crate) folder: Option<PathBuf>,
    opened: Mutex<Option<Opened>>,
    /// Where the folder's file system was mounted when it was opened last.
    mount: Mutex<Option<PathBuf>>,
}

/// A tier that is open.
struct Opened {
    root: Root,
    /// Which folder it was, where it was opened as one: device and inode.
    folder: Option<(u64, u64)>,
}

impl Tiers {
    /// Takes the tiers of a configuration. Nothing is opened yet: what is not there now may come, and what is wrong
    /// with a place is told when it is looked at.
    ///
    /// Errors: `usage` where there are none, or two in one place.
    pub fn open(config: &Config) -> Result<Arc<Self>> {
        Self::with_stores(config, Vec::new(), Arc::new(SystemClock::default()))
    }

    /// The same with stores that are open already, in the order of the tiers, and a clock for their limits.
    pub fn with_stores(
        config: &Config,
        stores: Vec<Arc<dyn Store>>,
        clock: Arc<dyn Clock>,
    ) -> Result<Arc<Self>> {
        Self::build(config, stores, &clock, None, |_, tier| fresh(&clock, tier))
    }

    /// The tiers of another job of that name, with [shares](Limits::share) of the limits of these in their order: a cap
    /// is the machine's, however many jobs there are. Stores as in [`with_stores`](Self::with_stores).
    ///
    /// A tier that these do not have gets limits of its own. Errors: as there.
    pub fn beside(
        &self,
        job: &str,
        config: &Config,
        stores: Vec<Arc<dyn Store>>,
    ) -> Result<Arc<Self>> {
        let limits = |number: usize, tier: &TierConfig| match self.tiers.get(number) {
            Some(tier) => tier.limits.share(),
            None => fresh(&self.clock, tier),
        };
        Self::build(config, stores, &self.clock, Some(job), limits)
    }

    fn build(
        config: &Config,
        stores: Vec<Arc<dyn Store>>,
        clock: &Arc<dyn Clock>,
        job: Option<&str>,
        limits: impl Fn(usize, &TierConfig) -> Limits,
    ) -> Result<Arc<Self>> {
        if config.tiers.is_empty() {
            let error = Error::new(Code::Usage, "no tiers are configured");
            return Err(error.hint("`[[tier]]` tables of forebay.toml say where they are"));
        }
        let mut places = BTreeSet::new();
        for tier in &config.tiers {
            if tier.place != "memory:" && !places.insert(tier.place.trim_end_matches('/')) {
                let what = format!("tier `{}` is where another tier is", tier.name);
                return Err(Error::new(Code::Usage, what));
            }
        }
        let mut given = stores.into_iter();
        let mut tiers = Vec::new();
        for (number, tier) in config.tiers.iter().enumerate() {
            let limits = Arc::new(limits(number, tier));
            let folder = folder_of(&tier.place);
            let given = given.next().map(|store| root_of(store, clock));
            let opened = given.map(|root| Opened { root, folder: None });
            let opened = Mutex::new(opened);
            let (config, mount) = (tier.clone(), Mutex::default());
            tiers.push(Tier { config, limits, folder, opened, mount });
        }
        let (config, clock, job) = (config.clone(), Arc::clone(clock), job.map(str::to_owned));
        Ok(Arc::new(Self { config, tiers, clock, who: who(), job }))
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.tiers.len()
    }

    /// The checkpoints of a tier, opened now if they were not; a folder is made. Errors: those of opening it; `usage`
    /// for no tier.
    pub fn root(&self, tier: usize) -> Result<Root> {
        self.tier(tier)?.root(&self.clock)
    }

    /// The same for who only looks: nothing is made. `None` where a folder is not there yet, and can be made.
    pub fn found(&self, tier: usize) -> Result<Option<Root>> {
        self.tier(tier)?.open(&self.clock, false)
    }

    /// The same where it must be there. Errors: `not_found`; those of opening it.
    pub(crate) fn existing(&self, tier: usize) -> Result<Root> {
        let place = || self.tiers.get(tier).map(|tier| tier.config.place.clone());
        let none = || Error::new(Code::NotFound, "no such folder").at(place().unwrap_or_default());
        self.found(tier)?.ok_or_else(none)
    }

    /// Host and process, for people.
    pub fn who(&self) -> &str {
        &self.who
    }

    /// What it was configured with.
    pub fn config(&self) -> &Config {
        &self.config
    }

    pub(crate) fn tier(&self, tier: usize) -> Result<&Tier> {
        let none = || Error::new(Code::Usage, format!("there is no tier {tier}"));
        self.tiers.get(tier).ok_or_else(none)
    }

    /// A tier with its limits, as a hop sees it. Errors: those of [`root`](Self::root).
    pub fn side(&self, tier: usize) -> Result<Side> {
        let found = self.tier(tier)?;
        Ok(Side { root: found.root(&self.clock)?, limits: Arc::clone(&found.limits) })
    }

    /// The rules, with what people want kept.
    pub(crate) fn rules(&self, pins: &BTreeSet<u64>, holds: BTreeSet<u64>) -> Rules {
        let of_tier = |tier: &Tier| TierRules {
            takes: tier.config.takes,
            keep: tier.keep(pins),
            capacity: tier.config.capacity,
            ever: tier.config.capacity,
        };
        Rules {
            tiers: self.tiers.iter().map(of_tier).collect(),
            holds,
            backlog: self.config.moving.backlog,
        }
    }
}

impl Tier {
    /// What stays: all, where nothing is said; the newest always.
    fn keep(&self, pins: &BTreeSet<u64>) -> Keep {
        let config = &self.config;
        let default = if config.keeps_some() { 1 } else { usize::MAX };
        let last = config.keep_last.map(|last| usize::try_from(last).unwrap_or(usize::MAX));
        Keep {
            last: last.unwrap_or(default),
            every: config.keep_every,
            within: config.keep_within,
            pins: pins.clone(),
        }
    }

    pub(crate) fn root(&self, clock: &Arc<dyn Clock>) -> Result<Root> {
        let none = || Error::new(Code::NotFound, "no such folder").at(self.config.place.clone());
        self.open(clock, true)?.ok_or_else(none)
    }

    /// Opens it, unless it is open; `None` for a folder (or a drive with its records) that could be made, and is not to
    /// be.
    fn open(&self, clock: &Arc<dyn Clock>, make: bool) -> Result<Option<Root>> {
        let mut opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(Opened { root, .. }) = &*opened {
            return Ok(Some(root.clone()));
        }
        let mount = self.mount.lock().unwrap_or_else(PoisonError::into_inner).clone();
        mount.as_deref().map_or(Ok(()), mounted::check)?;
        // Before it is opened: if it is replaced in between the next look finds that.
        let id = self.folder.as_deref().and_then(id_of);
        let store = match &self.folder {
            Some(folder) if self.config.records.is_some() => {
                let url = self.config.url();
                if make {
                    create_split(&url, &self.config.store)?;
                } else if open_folder(folder, false)?.is_none() || is_unmade(&url)? {
                    return Ok(None);
                }
                open_store(&url, &self.config.store)?
            }
            Some(folder) => match open_folder(folder, make)? {
                Some(store) => Arc::new(store) as Arc<dyn Store>,
                None => return Ok(None),
            },
            None => open_store(&self.config.place, &self.config.store)?,
        };
        let root = root_of(store, clock);
        let mut mount = self.mount.lock().unwrap_or_else(PoisonError::into_inner);
        *mount = self.folder.as_deref().and_then(mounted::mount_of);
        // One that was made just now is known at the next look.
        let folder = id.or_else(|| self.folder.as_deref().and_then(id_of));
        *opened = Some(Opened { root: root.clone(), folder });
        Ok(Some(root))
    }

    /// Opens it anew at the next use: what was a folder may be another now (a file system that was mounted again).
    pub(crate) fn close(&self) {
        if self.folder.is_some() {
            *self.opened.lock().unwrap_or_else(PoisonError::into_inner) = None;
        }
    }

    /// Whether its folder is another one than was opened, or none any more; it is closed then.
    pub(crate) fn was_replaced(&self) -> bool {
        let opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
        let known = opened.as_ref().and_then(|opened| opened.folder);
        drop(opened);
        // Not while it is locked: a file system may hang.
        let replaced = known.is_some_and(|known| {
            self.folder.as_deref().is_some_and(|folder| id_of(folder) != Some(known))
        });
        if replaced {
            self.close();
        }
        replaced
    }
}

/// Device and inode.
fn id_of(folder: &Path) -> Option<(u64, u64)> {
    let found = std::fs::metadata(folder).ok()?;
    Some((found.dev(), found.ino()))
}

/// Limits that nobody shares yet.
fn fresh(clock: &Arc<dyn Clock>, tier: &TierConfig) -> Limits {
    let caps = Caps { read: tier.read_limit, write: tier.write_limit };
    Limits::new(Arc::clone(clock), caps)
}

fn root_of(store: Arc<dyn Store>, clock: &Arc<dyn Clock>) -> Root {
    Root { store, clock: Arc::clone(clock), identify: Arc::new(OurMetadata) }
}

/// The folder that a place is, if it is one.
pub(super) fn folder_of(place: &str) -> Option<PathBuf> {
    if place.contains("://") || place.starts_with("memory:") {
        return place
            .strip_prefix("file://")
            .filter(|path| path.starts_with('/'))
            .map(PathBuf::from);
    }
    Some(PathBuf::from(place.strip_prefix("file:").unwrap_or(place)))
}

/// Opens a folder, and makes it, if that is asked for, where the one above it is there: where that is missing, a file
/// system is not mounted, and what would be made is on another one. `None`: it could be made.
fn open_folder(folder: &Path, make: bool) -> Result<Option<PosixStore>> {
    match PosixStore::open(folder) {
        Err(error) if error.code() == Code::NotFound && !folder.exists() => {
            match (above(folder).is_dir(), make) {
                (true, true) => PosixStore::create(folder).map(Some),
                (true, false) => Ok(None),
                (false, _) => Err(error.hint("make the folder, or mount what it is on")),
            }
        }
        opened => opened.map(Some),
    }
}

/// The folder that one lies in.
pub(super) fn above(folder: &Path) -> &Path {
    let above = folder.parent().filter(|above| !above.as_os_str().is_empty());
    above.unwrap_or(Path::new("."))
}

/// Host and process, for people.
fn who() -> String {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    format!("{host}, process {}", std::process::id())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Beside;

    fn open(text: &str) -> Result<Arc<Tiers>> {
        let config = Config::from_text(text, Path::new("/x/forebay.toml"), &Beside::default())?;
        Tiers::open(&config)
    }

    #[test]
    fn a_folder_is_made_where_the_one_above_is_there() {
        let above = tempfile::tempdir().unwrap();
        let tier = |name: &str, folder: &Path| {
            format!("[[tier]]\nname = \"{name}\"\nplace = \"{}\"\n", folder.display())
        };
        let (new, lost) = (above.path().join("new"), above.path().join("no/mount"));
        let tiers = open(&(tier("new", &new) + &tier("lost", &lost))).unwrap();
        assert!(tiers.found(0).unwrap().is_none() && !new.exists(), "looking makes nothing");
        assert!(tiers.root(0).is_ok() && new.is_dir());
        assert!(tiers.found(0).unwrap().is_some() && tiers.found(1).is_err());
        let error = tiers.root(1).err().unwrap();
        assert_eq!(error.code(), Code::NotFound);
        assert!(!lost.exists() && error.render().contains("mount"));
        std::fs::create_dir(above.path().join("no")).unwrap();
        assert!(tiers.root(1).is_ok(), "it came later");
    }

    #[test]
    fn a_folder_that_was_replaced_is_opened_anew() {
        let above = tempfile::tempdir().unwrap();
        let folder = above.path().join("tier");
        let place = format!("[[tier]]\nname = \"a\"\nplace = \"{}\"\n", folder.display());
        let tiers = open(&place).unwrap();
        let tier = tiers.tier(0).unwrap();
        tiers.root(0).unwrap().store.put("old", b"1").unwrap();
        assert!(!tier.was_replaced());
        std::fs::rename(&folder, above.path().join("aside")).unwrap();
        assert!(tier.was_replaced() && tiers.found(0).unwrap().is_none());
        std::fs::create_dir(&folder).unwrap();
        assert!(!tier.was_replaced(), "it is not open");
        let store = tiers.root(0).unwrap().store;
        store.put("new", b"2").unwrap();
        assert!(folder.join("new").is_file() && !folder.join("old").exists());
    }

    #[test]
    fn tiers_that_can_never_be_are_refused() {
        assert_eq!(open("").err().unwrap().code(), Code::Usage);
        let twice =
            "[[tier]]\nname = \"a\"\nplace = \"/a\"\n[[tier]]\nname = \"b\"\nplace = \"/a/\"\n";
        assert_eq!(open(twice).err().unwrap().code(), Code::Usage);
        assert_eq!(folder_of("file:///a/b"), Some(PathBuf::from("/a/b")));
        assert_eq!(folder_of("s3://b/x"), None);
    }
}
