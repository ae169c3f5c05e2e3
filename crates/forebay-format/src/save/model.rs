//! A whole model, saved in one step.
//!
//! A model in several files becomes visible when its index does, so the index goes last:
//!
//! 1. every file is written under a temporary name and forced to the disk;
//! 2. each gets its final name, one that nothing had, and the folder is forced to the disk;
//! 3. the index replaces the old one: now the new model is the model;
//! 4. files that the *old* model named and the new one does not are removed. Others are left alone.
//!
//! Names are the usual `model-00001-of-00003.safetensors`; if one of them is taken (by the old model, which must
//! stay loadable until step 3, or by a leftover), all carry a suffix: `model-1f2e3d4c-00001-of-00003.safetensors`.
//! Until step 3 a failure removes what was renamed; a crash leaves files that no index names and no reader looks at.
//!
//! A model in one file is `model.safetensors`, replaced in one rename; an old index, which readers would prefer, is
//! removed after it, and that is the moment the new model counts. Only where that index names `model.safetensors`
//! itself (or cannot be read, so that nobody knows) the new model gets an index too.

use super::atomic::{AtomicFile, Durability, DurableFile, Folder, check_wanted};
use super::shards::{ShardPlan, index_json, shard_layout, shard_name};
use super::temp::{clean_stale_temps, fresh_name};
use crate::folder::{INDEX, SINGLE};
use crate::index::Index;
use crate::open_file::OpenFile;
use crate::parallel;
use crate::safetensors::{SaveLayout, TensorSpec, layout_of};
use crate::text::shown;
use forebay_error::{Code, Error, Result};
use rustix::fs::FileType;
use sha2::{Digest, Sha256};
use std::collections::HashSet;
use std::ffi::OsString;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

/// A model being saved. Dropped, it leaves nothing.
#[derive(Debug)]
pub struct ModelSave {
    folder: Arc<Folder>,
    shards: Vec<Shard>,
    index: Option<String>,
    /// For the index, which is made anew where names were taken meanwhile.
    specs: Vec<TensorSpec>,
    old: Old,
}

/// One file of a model being saved. Its header is written and its space reserved.
#[derive(Debug)]
pub struct Shard {
    /// The name it will have.
    pub name: String,
    /// Places of its tensors in the list given.
    pub tensors: Vec<usize>,
    /// Where they go; the lists of the layout are in the order of `tensors`.
    pub layout: SaveLayout,
    /// The file to write to.
    pub file: AtomicFile,
}

/// What a commit did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Saved {
    /// The files of the model, without the index.
    pub files: Vec<String>,
    /// Files of the old model that were removed.
    pub removed: Vec<String>,
    /// Whether the names are known to be on the disk.
    pub durability: Durability,
    /// What went less than well without harm to the new model.
    pub warnings: Vec<String>,
}

/// What the folder held before.
#[derive(Debug)]
enum Old {
    Nothing,
    Single,
    /// An index, and the files it names.
    Indexed(HashSet<String>),
    /// An index that cannot be read.
    Unreadable,
}

impl ModelSave {
    /// Plans a model in files of at most `max_shard_bytes` of tensors, makes the temporary files, reserves their space
    /// and writes their headers. The folder is made if it is not there. Leftovers of killed processes are removed.
    pub fn create(
        folder: &Path,
        tensors: &[TensorSpec],
        metadata: Option<&[(String, String)]>,
        max_shard_bytes: u64,
    ) -> Result<Self> {
        let mut plans = shard_layout(tensors, max_shard_bytes)?;
        let folder = make_folder(folder)?;
        clean_stale_temps(&folder.path)?;
        let old = Old::of(&folder)?;
        let plain = plans.len() == 1 && old.leaves_single();
        if !plain {
            choose_names(&mut plans, &folder)?;
        }
        refuse_duplicates(tensors)?;
        let index = if plain { None } else { Some(index_json(&plans, tensors)?) };
        let shards = plans.into_iter().map(|plan| Shard::create(&folder, plan, tensors, metadata));
        let shards = shards.collect::<Result<_>>()?;
        Ok(Self { folder, shards, index, specs: tensors.to_vec(), old })
    }

    /// The files to write.
    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }

    /// Makes what was written the model of the folder.
    pub fn commit(self) -> Result<Saved> {
        self.commit_if(|| true)
    }

    /// Commits, if `go` says so before the first file gets its name and again before the index does: what comes
    /// before each may take long, and the caller may have given up meanwhile. Then the error is `cancelled`, the old
    /// model stays, and nothing of the new one is left.
    pub fn commit_if(self, go: impl Fn() -> bool) -> Result<Saved> {
        let Self { folder, mut shards, index, specs, old } = self;
        for synced in parallel::map(&shards, |shard| shard.file.sync()) {
            synced?;
        }
        // One save after the other: the old model is the one that the other has published meanwhile, and its names are
        // taken.
        let _turn = folder.take_turn();
        check_wanted(&go)?;
        let old = Old::of(&folder).unwrap_or(old);
        let index = index.map(|index| rename_taken(&folder, &mut shards, &specs, index));
        let index = index.transpose()?;
        let files: Vec<String> = shards.iter().map(|shard| shard.name.clone()).collect();
        let durability = match index {
            Some(index) => publish_indexed(&folder, shards, &index, &go)?,
            None => publish_single(&folder, shards, &old)?,
        };
        let (removed, mut warnings) = remove_old(&folder, &old, &files);
        if !removed.is_empty() {
            folder.sync()?;
        }
        if files.iter().all(|name| name != SINGLE) && folder.kind(SINGLE)?.is_some() {
            warnings.push(format!(
                "{SINGLE} beside the index is not part of the model, but some readers prefer it"
            ));
        }
        Ok(Saved { files, removed, durability, warnings })
    }
}

impl Old {
    fn of(folder: &Folder) -> Result<Self> {
        if folder.kind(INDEX)?.is_some() {
            let index =
                OpenFile::open(&folder.path.join(INDEX)).and_then(|file| Index::read(&file));
            return Ok(match index {
                Ok(index) => Self::Indexed(index.files.into_iter().map(|file| file.name).collect()),
                Err(_) => Self::Unreadable,
            });
        }
        Ok(if folder.kind(SINGLE)?.is_some() { Self::Single } else { Self::Nothing })
    }

    /// Whether replacing `model.safetensors` leaves the old model whole or replaces all of it.
    fn leaves_single(&self) -> bool {
        match self {
            Self::Nothing | Self::Single => true,
            Self::Indexed(files) => !files.contains(SINGLE),
            Self::Unreadable => false,
        }
    }
}

impl Shard {
    fn create(
        folder: &Arc<Folder>,
        plan: ShardPlan,
        tensors: &[TensorSpec],
        metadata: Option<&[(String, String)]>,
    ) -> Result<Self> {
        let ShardPlan { name, tensors: places } = plan;
        let picked: Vec<&TensorSpec> =
            places.iter().filter_map(|&place| tensors.get(place)).collect();
        let layout = layout_of(&picked, metadata)?;
        let file = AtomicFile::create_in(Arc::clone(folder), OsString::from(&name))?;
        file.preallocate(layout.total)?;
        file.file()
            .write_all_at(&layout.header, 0)
            .map_err(|error| Error::io("cannot write the header", error).at(shown(&file.dest())))?;
        Ok(Self { name, tensors: places, layout, file })
    }
}

/// Opens a folder, making it and those above it where they are not there. What was made is forced to the disk.
fn make_folder(path: &Path) -> Result<Arc<Folder>> {
    let missing: Vec<&Path> = path
        .ancestors()
        .take_while(|part| !part.as_os_str().is_empty() && !part.exists())
        .collect();
    std::fs::create_dir_all(path)
        .map_err(|error| Error::io("cannot make folder", error).at(shown(path)))?;
    for parent in missing.iter().filter_map(|made| made.parent()) {
        Folder::open(parent)?.sync()?;
    }
    Folder::open(path)
}

/// Within one file the layout refuses them; across files only this does.
fn refuse_duplicates(tensors: &[TensorSpec]) -> Result<()> {
    let mut seen = HashSet::with_capacity(tensors.len());
    match tensors.iter().find(|tensor| !seen.insert(tensor.name.as_str())) {
        Some(tensor) => {
            let what = format!("two tensors are named {}", crate::text::quoted(&tensor.name));
            Err(Error::new(Code::Usage, what))
        }
        None => Ok(()),
    }
}

/// Gives the files names that nothing has.
fn choose_names(plans: &mut [ShardPlan], folder: &Folder) -> Result<()> {
    let total = plans.len();
    let mut stem = "model".to_owned();
    for _ in 0..16 {
        let mut taken = false;
        for (index, plan) in plans.iter_mut().enumerate() {
            plan.name = shard_name(&stem, index, total);
            taken |= folder.kind(&plan.name)?.is_some();
        }
        if !taken {
            return Ok(());
        }
        // The name of a temporary file is unique on this machine, the time nearly so among machines.
        let seed = format!("{} {:?}", fresh_name(), std::time::SystemTime::now());
        let digest = Sha256::digest(seed.as_bytes());
        stem = format!("model-{}", crate::digest::hex(digest.get(..4).unwrap_or_default()));
    }
    let error = Error::new(Code::AlreadyExists, "no free names for the files of the model");
    Err(error.at(shown(&folder.path)))
}

/// Gives the files other names if any of theirs is taken; returns the index that fits.
fn rename_taken(
    folder: &Folder,
    shards: &mut [Shard],
    specs: &[TensorSpec],
    index: String,
) -> Result<String> {
    let mut taken = false;
    for shard in shards.iter() {
        taken |= folder.kind(&shard.name)?.is_some();
    }
    if !taken {
        return Ok(index);
    }
    let plan =
        |shard: &Shard| ShardPlan { name: shard.name.clone(), tensors: shard.tensors.clone() };
    let mut plans: Vec<ShardPlan> = shards.iter().map(plan).collect();
    choose_names(&mut plans, folder)?;
    for (shard, plan) in shards.iter_mut().zip(&plans) {
        shard.name.clone_from(&plan.name);
        shard.file.set_name(&plan.name);
    }
    index_json(&plans, specs)
}

fn publish_indexed(
    folder: &Arc<Folder>,
    shards: Vec<Shard>,
    index: &str,
    go: &impl Fn() -> bool,
) -> Result<Durability> {
    let mut published: Vec<String> = Vec::new();
    let result = publish_files_and_index(folder, shards, index, go, &mut published);
    // Once the index may be in place its files must stay, whatever the error says.
    if result.is_err() && !index_names(folder, &published) {
        for name in &published {
            // Nothing names them; what cannot be removed is a leftover without effect.
            let _ = folder.remove(name);
        }
    }
    result
}

fn publish_files_and_index(
    folder: &Arc<Folder>,
    shards: Vec<Shard>,
    index: &str,
    go: &impl Fn() -> bool,
    published: &mut Vec<String>,
) -> Result<Durability> {
    // Made first, so that a full disk is found before any name is given.
    let file = AtomicFile::create_in(Arc::clone(folder), OsString::from(INDEX))?;
    file.preallocate(index.len() as u64)?;
    file.file()
        .write_all_at(index.as_bytes(), 0)
        .map_err(|error| Error::io("cannot write the index", error).at(shown(&file.dest())))?;
    let file = file.make_durable()?;
    for shard in shards {
        DurableFile::of_synced(shard.file).publish_new()?;
        published.push(shard.name);
    }
    folder.sync()?;
    check_wanted(go)?;
    file.publish()?;
    folder.sync()
}

/// Whether the index in the folder names any of these files. In doubt it does.
fn index_names(folder: &Folder, files: &[String]) -> bool {
    let path = folder.path.join(INDEX);
    match OpenFile::open(&path).and_then(|file| Index::read(&file)) {
        Ok(index) => files.iter().any(|file| index.names(file)),
        Err(error) => error.code() != Code::NotFound,
    }
}

fn publish_single(folder: &Folder, shards: Vec<Shard>, old: &Old) -> Result<Durability> {
    for shard in shards {
        DurableFile::of_synced(shard.file).publish()?;
    }
    let durability = folder.sync()?;
    match old {
        Old::Indexed(_) => match folder.remove(INDEX) {
            Err(error) if error.code() != Code::NotFound => Err(error),
            _ => folder.sync(),
        },
        _ => Ok(durability),
    }
}

/// Removes the files that the old model named and the new one does not.
fn remove_old(folder: &Folder, old: &Old, new: &[String]) -> (Vec<String>, Vec<String>) {
    let mut names: Vec<&str> = match old {
        Old::Indexed(files) => files.iter().map(String::as_str).collect(),
        Old::Single => vec![SINGLE],
        Old::Nothing | Old::Unreadable => Vec::new(),
    };
    names.retain(|name| new.iter().all(|new| new != name));
    names.sort_unstable();
    let (mut removed, mut warnings) = (Vec::new(), Vec::new());
    for name in names {
        // Only what is surely a model's: an index can name any file of the folder, and a folder below may be a link to
        // elsewhere.
        let ours = name.ends_with(".safetensors") && !name.starts_with('.') && !name.contains('/');
        let file = matches!(folder.kind(name), Ok(Some(FileType::RegularFile | FileType::Symlink)));
        if !ours || !file {
            if !matches!(folder.kind(name), Ok(None)) {
                let name = crate::text::quoted(name);
                warnings.push(format!("a file that the old index names stays: {name}"));
            }
            continue;
        }
        match folder.remove(name) {
            Ok(()) => removed.push(name.to_owned()),
            Err(error) if error.code() == Code::NotFound => {}
            Err(error) => warnings.push(format!("a file of the old model stays: {error}")),
        }
    }
    (removed, warnings)
}
