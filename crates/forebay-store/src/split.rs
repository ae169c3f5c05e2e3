//! A store in two places: records where all nodes see them, data on the drive of each node.
//!
//! A job on several nodes can save to their own drives only if there is one place where it is agreed what was saved:
//! records (begin, part, decision, `.metadata`, the manifest: a few megabytes a step) are small and go there, data
//! files stay on the node. Nothing of the commit changes by that. What each node lists is all records and its own data,
//! so a collector finds what its own node is to remove, and nobody can say of another node's files that they are
//! missing ([`Store::sees_all`]).
//!
//! ```text
//! node://RECORDS/FOLDER      records below RECORDS/.forebay/nodes, data below FOLDER. RECORDS is a path or a URL,
//!                            with `/`, `:` and `%` as %2F, %3A and %25
//! near://ROOT/FOLDER         to read ROOT, data from FOLDER as far as they are there
//! ```
//!
//! A drive and its records belong together: both have the same random name under [`NAME_KEY`]. Where the records are
//! not there any more, or are others (a file system that is not mounted, a folder that was made anew), everything on
//! the drive would look like left over; so nothing is listed then.
//!
//! What a drive has to say of itself (its name, which of its files are copies) lies on it too, below [`NODE_OWN`].
//!
//! The folder of records lies below `.forebay`, where no listing of the place itself sees steps: only what is complete
//! in one place is a checkpoint there.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use forebay_engine::RangeSource;
use forebay_error::{Code, Error, Result};

use crate::bucket::{Place, StoreSettings};
use crate::key::is_temp;
use crate::object::{Abilities, DataObject, Expect, Listed, Published, Version};
use crate::posix::PosixStore;
use crate::shared::{local_path, shared_store};
use crate::store::Store;
use crate::unique::random;

/// Where records of node-local steps are, below the place of records.
pub const NODE_RECORDS: &str = ".forebay/nodes";
/// What below this is of one node alone, and stays on its drive, whatever it is called.
pub const NODE_OWN: &str = ".forebay/here/";
/// What both places have: 16 hex digits, made once.
const NAME_KEY: &str = ".forebay/place";
/// Most bytes of it that are read.
const NAME_BYTES_MAX: u64 = 64;
/// How names of data files end; every other object is a record.
const DATA_END: &str = ".distcp";
/// Most folders of a node that are looked at when it is opened.
const FOLDERS_MAX: usize = 1 << 22;

/// What is told where they are not there.
const NO_RECORDS: &str = "there are no records, and this drive has files of some";

/// See the module.
pub struct SplitStore {
    records: Arc<dyn Store>,
    data: Arc<dyn Store>,
    /// What the records must be called.
    name: Option<Vec<u8>>,
    /// Whether data that are not here are read where the records are.
    reads_on: bool,
}

impl SplitStore {
    /// Records in one store, data in another.
    pub fn new(records: Arc<dyn Store>, data: Arc<dyn Store>) -> Self {
        Self { records, data, name: None, reads_on: false }
    }

    /// The same of places that belong together. Errors: `not_shared` where they do not.
    fn named(records: Arc<dyn Store>, data: Arc<dyn Store>) -> Result<Self> {
        let name = data.get(NAME_KEY, NAME_BYTES_MAX)?.map(|(bytes, _)| bytes);
        let store = Self { records, data, name, reads_on: false };
        store.check_name()?;
        Ok(store)
    }

    /// Fails where the records are not those of this drive.
    fn check_name(&self) -> Result<()> {
        let Some(name) = &self.name else { return Ok(()) };
        let there = self.records.get(NAME_KEY, NAME_BYTES_MAX)?.map(|(bytes, _)| bytes);
        if there.as_ref() == Some(name) {
            // A drive that somebody has emptied is still the one that was opened.
            return self.data.create(NAME_KEY, name).map(drop);
        }
        let what = match there {
            None => NO_RECORDS,
            Some(_) => "these are not the records of this drive's files",
        };
        Err(apart(what, &self.data.name(), &self.records.name()))
    }

    /// A whole store, whose data are read from another one as far as they are there.
    pub fn near(whole: Arc<dyn Store>, data: Arc<dyn Store>) -> Self {
        Self { records: whole, data, name: None, reads_on: true }
    }

    /// Where something is written to and removed from.
    fn of(&self, key: &str) -> &Arc<dyn Store> {
        if stays(key) && !self.reads_on { &self.data } else { &self.records }
    }
}

/// Whether a folder is the drive of a node: it knows its records by name. Errors: I/O.
pub fn is_drive(data: &dyn Store) -> Result<bool> {
    Ok(data.get(NAME_KEY, NAME_BYTES_MAX)?.is_some())
}

/// A drive that is open already, with its records at a place that all nodes share. Nothing is made.
///
/// Errors: `not_shared` where the records are others, or not there; those of opening them.
pub fn drive_store(
    records: &str,
    data: Arc<dyn Store>,
    settings: &StoreSettings,
) -> Result<Arc<dyn Store>> {
    let records = records_of(records, &*data, settings)?;
    Ok(Arc::new(SplitStore::named(records, data)?))
}

/// The records of a drive, opened. Errors: `not_shared` where it knows some and they are not there; those of opening
/// them.
fn records_of(whole: &str, data: &dyn Store, settings: &StoreSettings) -> Result<Arc<dyn Store>> {
    let place = below(whole, NODE_RECORDS);
    match shared_store(&place, settings) {
        Err(error) if error.code() == Code::NotFound && is_drive(data)? => {
            Err(apart(NO_RECORDS, &data.name(), &place))
        }
        opened => opened,
    }
}

/// A drive and the place of its records that do not belong together.
fn apart(what: &str, drive: &str, records: &str) -> Error {
    let error = Error::new(Code::NotShared, what).at(drive);
    let hint = format!("its records should be in {records}: is its file system mounted?");
    error.hint(hint + " a job's drives and records stay together")
}

/// Opens a `node:` or `near:` place. `settings` are those of the place of all nodes, where it is a bucket.
pub(crate) fn open(
    whole: &str,
    folder: &Path,
    near: bool,
    settings: &StoreSettings,
) -> Result<SplitStore> {
    let (given, (folder, step)) = (folder, without_step(folder));
    let data = Arc::new(PosixStore::open(if step.is_empty() { folder } else { given })?);
    if !near && step.is_empty() {
        return SplitStore::named(records_of(whole, &*data, settings)?, data);
    }
    let whole = below(whole, if near { "" } else { NODE_RECORDS });
    let whole = shared_store(&below(&whole, step), settings)?;
    Ok(if near { SplitStore::near(whole, data) } else { SplitStore::new(whole, data) })
}

/// The folder of this node of a `node:` or `near:` place; `None` where it is another place. Errors: `usage` for what is
/// none.
pub fn split_folder(url: &str) -> Result<Option<PathBuf>> {
    Ok(match Place::parse(url)? {
        Place::Split { folder, .. } => Some(folder),
        _ => None,
    })
}

/// Makes the folders of a `node:` place, where the ones above them are there: where those are missing, a file system is
/// not mounted.
///
/// Both get the name by which they know each other.
///
/// Errors: `usage` for other places; `not_shared` where they have belonged to others before; `already_exists` where
/// whole checkpoints are in the node's folder, which nobody would see again; `not_found`, I/O.
pub fn create_split(url: &str, settings: &StoreSettings) -> Result<()> {
    let Place::Split { whole, folder, near: false } = Place::parse(url)? else {
        return Err(Error::new(Code::Usage, "not a place on a node").at(url));
    };
    let missing = |error: Error| error.hint("make the folder, or mount what it is on");
    if !without_step(&folder).1.is_empty() {
        let what = "a folder for a node's own files is called like that of a step";
        return Err(Error::new(Code::Usage, what)
            .at(folder.display())
            .hint("give it another name"));
    }
    make(&folder).map_err(missing)?;
    let data = PosixStore::open(&folder)?;
    let known = data.get(NAME_KEY, NAME_BYTES_MAX)?.is_some();
    if !known {
        check_own(&data)?;
        if let Some(records) = local_path(&whole)? {
            make(&records).map_err(missing)?;
            PosixStore::create(&records.join(NODE_RECORDS)).map(drop)?;
        }
    }
    // Of a drive that has some they are never made anew: what they are on may not be mounted.
    let records = records_of(&whole, &data, settings)?;
    if known {
        return SplitStore::named(records, Arc::new(data)).map(drop);
    }
    let own = format!("{:016x}", random());
    records.create(NAME_KEY, own.as_bytes())?;
    let missing = || Error::new(Code::NotFound, "what was written is gone").at(records.name());
    let name = records.get(NAME_KEY, NAME_BYTES_MAX)?.ok_or_else(missing)?.0;
    data.create(NAME_KEY, &name)?;
    // Another process of this node may have been quicker.
    SplitStore::named(records, Arc::new(data)).map(drop)
}

/// Whether a `node:` place is one that [`create_split`] has yet to make: the folder is no drive, and there are no
/// records where it could make them. Nothing is made.
///
/// Errors: `already_exists` as there; `usage`; those of opening the folder.
pub fn is_unmade(url: &str) -> Result<bool> {
    let Place::Split { whole, folder, near: false } = Place::parse(url)? else { return Ok(false) };
    let Some(records) = local_path(&whole)? else { return Ok(false) };
    let data = PosixStore::open(&folder)?;
    if is_drive(&data)? || records.join(NODE_RECORDS).exists() || !above(&records).is_dir() {
        return Ok(false);
    }
    check_own(&data).map(|()| true)
}

fn check_own(data: &PosixStore) -> Result<()> {
    for (name, is_folder) in data.names("", FOLDERS_MAX)? {
        let below =
            if is_folder { data.names(&format!("{name}/"), FOLDERS_MAX)? } else { Vec::new() };
        if below.iter().any(|(name, _)| name == ".metadata" || is_data(name)) {
            let what = "the folder for a node's own files has files of other checkpoints in it";
            let error = Error::new(Code::AlreadyExists, what);
            return Err(error.at(format!("{}/{name}", data.name())).hint("take an empty folder"));
        }
    }
    Ok(())
}

fn make(folder: &Path) -> Result<()> {
    match PosixStore::open(folder) {
        Err(error) if error.code() == Code::NotFound => match above(folder).is_dir() {
            true => PosixStore::create(folder).map(drop),
            false => Err(error),
        },
        opened => opened.map(drop),
    }
}

fn above(folder: &Path) -> &Path {
    let above = folder.parent().filter(|above| !above.as_os_str().is_empty());
    above.unwrap_or(Path::new("."))
}

/// A folder and the step's below it, where it is one of a step.
fn without_step(folder: &Path) -> (&Path, &str) {
    let name = folder.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let is_step = name.strip_prefix("step-").is_some_and(|step| step.parse::<u64>().is_ok());
    match folder.parent() {
        Some(above) if is_step => (above, name),
        _ => (folder, ""),
    }
}

fn below(place: &str, name: &str) -> String {
    match name.is_empty() {
        true => place.to_owned(),
        false => format!("{}/{name}", place.trim_end_matches('/')),
    }
}

/// Whether a key, or a file's name, is of data of a rank: what a node keeps.
pub fn is_data(key: &str) -> bool {
    key.ends_with(DATA_END)
}

/// Whether an object is kept on the node's drive.
fn stays(key: &str) -> bool {
    is_data(key) || key.starts_with(NODE_OWN)
}

/// Lines of both, in the order of their keys; a record counts before what has the same key.
fn merged(records: Vec<Listed>, data: Vec<Listed>, limit: usize) -> Result<Vec<Listed>> {
    let own = data.into_iter().filter(|line| stays(&line.key) || is_temp(&line.key));
    let all = own.chain(records).map(|line| (line.key.clone(), line));
    let all: BTreeMap<String, Listed> = all.collect();
    if all.len() > limit {
        let what = format!("a listing of more than {limit} objects");
        return Err(Error::new(Code::Unsupported, what));
    }
    Ok(all.into_values().collect())
}

impl Store for SplitStore {
    fn name(&self) -> String {
        match self.reads_on {
            true => self.records.name(),
            false => self.data.name(),
        }
    }

    fn abilities(&self) -> Abilities {
        let (records, data) = (self.records.abilities(), self.data.abilities());
        if self.reads_on {
            return records;
        }
        Abilities {
            durable_publish: records.durable_publish && data.durable_publish,
            reserves_space: records.reserves_space && data.reserves_space,
            rejects_bad_checksums: data.rejects_bad_checksums,
            returns_checksums: data.returns_checksums,
            ..records
        }
    }

    fn forget_abilities(&self) {
        self.records.forget_abilities();
        self.data.forget_abilities();
    }

    fn is_remote(&self) -> bool {
        self.records.is_remote()
    }

    fn sees_all(&self) -> bool {
        self.reads_on && self.records.sees_all()
    }

    fn get(&self, key: &str, max_bytes: u64) -> Result<Option<(Vec<u8>, Version)>> {
        self.of(key).get(key, max_bytes)
    }

    fn create(&self, key: &str, bytes: &[u8]) -> Result<bool> {
        self.of(key).create(key, bytes)
    }

    fn put(&self, key: &str, bytes: &[u8]) -> Result<()> {
        self.of(key).put(key, bytes)
    }

    fn list(&self, prefix: &str, limit: usize) -> Result<Vec<Listed>> {
        if self.reads_on {
            return self.records.list(prefix, limit);
        }
        if prefix.starts_with(NODE_OWN) {
            return self.data.list(prefix, limit);
        }
        // Data first: of each that is seen there was a record before.
        let data = self.data.list(prefix, limit)?;
        self.check_name()?;
        merged(self.records.list(prefix, limit)?, data, limit)
    }

    fn list_here(&self, prefix: &str, limit: usize) -> Result<Vec<Listed>> {
        if self.reads_on {
            return self.records.list_here(prefix, limit);
        }
        if prefix.starts_with(NODE_OWN) {
            return self.data.list_here(prefix, limit);
        }
        let data = self.data.list_here(prefix, limit)?;
        self.check_name()?;
        merged(self.records.list_here(prefix, limit)?, data, limit)
    }

    fn names(&self, prefix: &str, limit: usize) -> Result<Vec<(String, bool)>> {
        if prefix.starts_with(NODE_OWN) && !self.reads_on {
            return self.data.names(prefix, limit);
        }
        let mut names = self.records.names(prefix, limit)?;
        if !self.reads_on {
            let own = self.data.names(prefix, limit)?.into_iter();
            names.extend(own.filter(|(name, is_folder)| *is_folder || is_data(name)));
            names.sort();
            names.dedup();
        }
        Ok(names)
    }

    fn remove(&self, key: &str) -> Result<bool> {
        match is_temp(key) && !self.reads_on {
            // Of either.
            true => Ok(self.records.remove(key)? | self.data.remove(key)?),
            false => self.of(key).remove(key),
        }
    }

    fn discard(&self, keys: &[String]) -> Result<()> {
        let (data, records): (Vec<_>, Vec<_>) = keys.iter().cloned().partition(|key| stays(key));
        let removed = if data.is_empty() { Ok(()) } else { self.data.discard(&data) };
        let records = if records.is_empty() { Ok(()) } else { self.records.discard(&records) };
        removed.and(records)
    }

    fn unfinished(&self, prefix: &str, limit: usize) -> Result<Vec<Listed>> {
        self.records.unfinished(prefix, limit)
    }

    fn forget_unfinished(&self, key: &str) -> Result<u64> {
        self.records.forget_unfinished(key)
    }

    fn publish(&self, staged: &str, to: &str, expect: &Expect) -> Result<Published> {
        if stays(staged) != stays(to) {
            let what = "a record cannot become a data file, nor the other way round";
            return Err(Error::new(Code::Unsupported, what).at(format!("{}/{to}", self.name())));
        }
        self.of(to).publish(staged, to, expect)
    }

    fn create_data(&self, key: &str, bytes: u64) -> Result<Box<dyn DataObject>> {
        self.of(key).create_data(key, bytes)
    }

    fn resume_data(&self, key: &str, bytes: u64) -> Result<Box<dyn DataObject>> {
        self.of(key).resume_data(key, bytes)
    }

    fn open_data(&self, key: &str) -> Result<Arc<dyn RangeSource>> {
        if !stays(key) {
            return self.records.open_data(key);
        }
        match self.data.open_data(key) {
            Err(error) if error.code() == Code::NotFound => match self.reads_on {
                true => self.records.open_data(key),
                false => Err(error.hint("it is on the drive of another node, or its node is gone")),
            },
            opened => opened,
        }
    }
}
