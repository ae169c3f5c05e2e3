//! Names of fields and classes, each compared once however often it occurs.

use crate::pickle::{Graph, Value};
use std::collections::HashMap;

macro_rules! fields {
    ($($variant:ident = $name:literal,)+) => {
        /// A field that the readers look for.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u8)]
        pub(super) enum Field {
            $($variant,)+
            /// Any other name.
            Other,
            /// Not looked at yet.
            Unseen,
        }

        fn field_of(name: &str) -> Field {
            match name { $($name => Field::$variant,)+ _ => Field::Other }
        }
    };
}

fields! {
    StateDictMetadata = "state_dict_metadata",
    PlannerData = "planner_data",
    StorageData = "storage_data",
    StorageMeta = "storage_meta",
    Version = "version",
    Properties = "properties",
    Size = "size",
    Chunks = "chunks",
    Offsets = "offsets",
    Sizes = "sizes",
    Fqn = "fqn",
    Offset = "offset",
    Index = "index",
    RelativePath = "relative_path",
    Length = "length",
    TransformDescriptors = "transform_descriptors",
    Dtype = "dtype",
    CheckpointId = "checkpoint_id",
    SaveId = "save_id",
    LoadId = "load_id",
    Modules = "modules",
}

/// The most fields of one object; torch's have up to 5. All objects of a file may share one state, which is walked for
/// each of them.
pub(super) const MAX_FIELDS: usize = 100;

/// No number yet, and none in the table.
const UNASKED: u32 = u32::MAX;
const ABSENT: u32 = u32::MAX - 1;

impl Field {
    /// The fields of a `Metadata` that torch knows.
    pub(super) const OF_METADATA: [Field; 5] = [
        Field::StateDictMetadata,
        Field::PlannerData,
        Field::StorageData,
        Field::StorageMeta,
        Field::Version,
    ];
}

/// A graph, and what is known of its texts.
pub(super) struct Names<'g, 'a> {
    pub(super) graph: &'g Graph<'a>,
    fields: Vec<Field>,
    /// Numbers given to texts by [`Names::number`], by their place in the graph.
    known: Vec<u32>,
}

impl<'g, 'a> Names<'g, 'a> {
    pub(super) fn new(graph: &'g Graph<'a>) -> Self {
        let texts = graph.texts();
        Self { graph, fields: vec![Field::Unseen; texts], known: vec![UNASKED; texts] }
    }

    /// Which field a key names.
    #[inline]
    pub(super) fn field(&mut self, key: Value) -> Field {
        let Some(field) = self.graph.text_number(key).and_then(|at| self.fields.get_mut(at)) else {
            return Field::Other;
        };
        if *field == Field::Unseen {
            *field = self.graph.as_str(key).map_or(Field::Other, field_of);
        }
        *field
    }

    /// The values of the fields of an object, each `None` where there is no such field.
    #[inline]
    pub(super) fn fields<const N: usize>(
        &mut self,
        object: Value,
        wanted: [Field; N],
    ) -> Option<[Option<Value>; N]> {
        let graph = self.graph;
        let state = graph.as_dict(graph.as_object(object)?.state)?;
        if state.len() > MAX_FIELDS {
            return None;
        }
        let mut found = [None; N];
        for (key, value) in state {
            let field = self.field(key);
            if let Some(at) = wanted.iter().position(|wanted| *wanted == field)
                && let Some(slot) = found.get_mut(at)
            {
                *slot = Some(value);
            }
        }
        Some(found)
    }

    /// The number of a text in `table`, which is asked once for each place in the graph; `None` where the value is no
    /// text or the table does not have it.
    #[inline]
    pub(super) fn number(&mut self, text: Value, table: &HashMap<&'g str, u32>) -> Option<u32> {
        let known = self.graph.text_number(text).and_then(|at| self.known.get_mut(at))?;
        if *known == UNASKED {
            *known = table.get(self.graph.as_str(text)?).copied().unwrap_or(ABSENT);
        }
        (*known != ABSENT).then_some(*known)
    }

    /// Gives a text its number in the table without asking there.
    pub(super) fn set_number(&mut self, text: Value, number: u32) {
        if let Some(known) = self.graph.text_number(text).and_then(|at| self.known.get_mut(at)) {
            *known = number;
        }
    }

    /// Whether a value is an instance of a class of this name, wherever the class lives: torch has moved some.
    pub(super) fn is_instance(&self, value: Value, class: &str) -> bool {
        let object = self.graph.as_object(value);
        object.is_some_and(|object| self.graph.is_global(object.callable, None, class))
    }

    /// Module and name of the class of an instance.
    pub(super) fn class_name(&self, value: Value) -> Option<(&'g str, &'g str)> {
        self.graph.global_name(self.graph.as_object(value)?.callable)
    }
}
