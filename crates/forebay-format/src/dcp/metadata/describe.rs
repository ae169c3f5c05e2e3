//! What `.metadata` says beside entries and places: ways in the nested state, who saved, what others added.
//!
//! None of it is needed to read a tensor, so oddities are warnings.

use super::names::Field;
use super::read::Reader;
use super::table::{NONE, StepRow};
use crate::pickle::{Items, Node, Value};
use crate::torch_zip::plain;
use std::collections::HashMap;

/// The most bytes of a text that is kept, and the most modules: texts may be shared, so that a list of them could be
/// much longer than the file.
const MAX_TEXT_BYTES: usize = 4096;
const MAX_MODULES: usize = 100;

/// The most attributes that others may add, each of which may take as long as a million values do.
const MAX_ATTRIBUTES: usize = 20;

/// What a writer says of a save as a whole.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StorageMeta {
    /// Where the checkpoint was written: the path at that time, as text.
    pub checkpoint_id: Option<String>,
    /// A random name of the save.
    pub save_id: Option<String>,
    /// A random name of a load; torch leaves it empty in files.
    pub load_id: Option<String>,
    /// Modules that have to be there to read it; torch 2.7 and newer.
    pub modules: Vec<String>,
}

/// Steps that were seen, so that each is kept once.
struct Steps<'g> {
    keys: HashMap<&'g str, u32>,
    indexes: HashMap<u64, u32>,
    /// Steps by the number of their text in the graph.
    of_text: Vec<u32>,
}

impl<'g> Reader<'g, '_> {
    /// The ways in the nested state, from `planner_data`; a planner that does not flatten leaves none.
    pub(super) fn paths(&mut self, planner: Value) {
        let graph = self.graph();
        if graph.is_none(planner) {
            self.out.is_flat = true;
            return;
        }
        let Some(pairs) = graph.as_dict(planner) else {
            self.warn("planner_data is no dict; ways in the nested state are not known".into());
            return;
        };
        let mut steps = Steps {
            keys: HashMap::new(),
            indexes: HashMap::new(),
            of_text: vec![NONE; graph.texts()],
        };
        let mut odd = 0_usize;
        for (key, path) in pairs {
            let row = self.names.number(key, &self.rows);
            let path = match (row, graph.as_sequence(path)) {
                (Some(_), Some(items)) => self.path(items, &mut steps),
                _ => None,
            };
            let row = row.and_then(|row| self.out.rows.get_mut(row as usize));
            match (row, path) {
                (Some(row), Some(path)) => row.path = path,
                _ => odd += 1,
            }
        }
        if odd > 0 {
            self.warn(format!("planner_data has {odd} items that are no way to an entry"));
        }
    }

    /// Keeps one way; `None` where it holds anything but texts and counts.
    fn path(&mut self, items: Items<'_>, steps: &mut Steps<'g>) -> Option<(u32, u32)> {
        let start = self.out.steps.len();
        // Entries may share one long way; honest ones take more bytes of the file than steps.
        if start.saturating_add(items.len()) > self.input_bytes {
            return None;
        }
        for item in items {
            match self.step(item, steps) {
                Some(step) => self.out.steps.push(step),
                None => {
                    self.out.steps.truncate(start);
                    return None;
                }
            }
        }
        let len = self.out.steps.len() - start;
        Some((u32::try_from(start).ok()?, u32::try_from(len).ok()?))
    }

    fn step(&mut self, item: Value, steps: &mut Steps<'g>) -> Option<u32> {
        let graph = self.graph();
        let distinct = &mut self.out.distinct_steps;
        let mut add = |step| {
            distinct.push(step);
            (distinct.len() - 1) as u32
        };
        let Some(text) = graph.text_number(item) else {
            let index = graph.as_u64(item)?;
            let step = steps.indexes.entry(index);
            return Some(*step.or_insert_with(|| add(StepRow::Index(index))));
        };
        let known = steps.of_text.get_mut(text)?;
        if *known == NONE {
            let key = graph.as_str(item)?;
            let step = steps.keys.entry(key);
            *known = *step.or_insert_with(|| add(StepRow::Key(key.into())));
        }
        Some(*known)
    }

    /// Everything else in the root.
    pub(super) fn describe(&mut self, root: Value) {
        let graph = self.graph();
        let wanted = [Field::StorageMeta, Field::Version];
        if let Some([meta, version]) = self.names.fields(root, wanted) {
            self.out.storage_meta = meta.and_then(|meta| self.storage_meta(meta));
            self.out.version = version.and_then(|version| short(graph.as_str(version)?));
        }
        let state = graph.as_object(root).and_then(|root| graph.as_dict(root.state));
        for (key, value) in state.into_iter().flatten() {
            if Field::OF_METADATA.contains(&self.names.field(key)) {
                continue;
            }
            let Some(name) = graph.as_str(key).and_then(short) else {
                self.warn("the metadata has an attribute whose name is no short text".into());
                continue;
            };
            if self.out.attributes.len() == MAX_ATTRIBUTES {
                self.warn(format!("only {MAX_ATTRIBUTES} attributes of the metadata are kept"));
                break;
            }
            self.out.attributes.push((name, plain(graph, value)));
        }
    }

    fn storage_meta(&mut self, meta: Value) -> Option<StorageMeta> {
        let graph = self.graph();
        if graph.is_none(meta) {
            return None;
        }
        let wanted = [Field::CheckpointId, Field::SaveId, Field::LoadId, Field::Modules];
        let Some([checkpoint, save, load, modules]) = self.names.fields(meta, wanted) else {
            self.warn("storage_meta is of a kind that is not known".into());
            return None;
        };
        let text = |value: Option<Value>| value.and_then(|value| self.path_text(value));
        let modules = modules.and_then(|modules| graph.as_sequence(modules));
        let modules = modules.into_iter().flatten().take(MAX_MODULES);
        Some(StorageMeta {
            checkpoint_id: text(checkpoint),
            save_id: text(save),
            load_id: text(load),
            modules: modules.filter_map(|module| short(graph.as_str(module)?)).collect(),
        })
    }

    /// A text, or a `pathlib` path: of one text (Python 3.13 and newer) or of its parts.
    fn path_text(&self, value: Value) -> Option<String> {
        let graph = self.graph();
        let parts = match graph.node(value) {
            Node::Str(_) | Node::Surrogate(_) => return self.path_part(value),
            Node::Call(call) => {
                let (module, name) = graph.global_name(call.callable)?;
                let is_path = module.starts_with("pathlib") && name.ends_with("Path");
                graph.as_sequence(call.args).filter(|_| is_path)?
            }
            _ => return None,
        };
        let mut path = String::new();
        for part in parts.take(MAX_TEXT_BYTES) {
            if !path.is_empty() && !path.ends_with(['/', '\\']) {
                path.push('/');
            }
            path.push_str(&self.path_part(part)?);
            if path.len() > MAX_TEXT_BYTES {
                return None;
            }
        }
        Some(path)
    }

    fn path_part(&self, part: Value) -> Option<String> {
        match self.graph().node(part) {
            Node::Str(text) => short(text),
            Node::Surrogate(bytes) => {
                let head = bytes.get(..MAX_TEXT_BYTES).unwrap_or(bytes);
                Some(String::from_utf8_lossy(head).into_owned())
            }
            _ => None,
        }
    }
}

/// A text to keep; `None` where it is too long.
fn short(text: &str) -> Option<String> {
    (text.len() <= MAX_TEXT_BYTES).then(|| text.to_string())
}
