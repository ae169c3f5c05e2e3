//! What a runner can be asked to do, and what came of it: the same in the command, in the agent's API and in Python.

use serde::{Deserialize, Serialize};

/// Something to do now. As JSON: `{"action": "pin", "step": 100, "name": "best"}`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "action", rename_all = "snake_case", deny_unknown_fields)]
pub enum Action {
    /// Lets nothing more in or out of a tier, or of all: for phases in which the network belongs to others. What is
    /// under way stops within one part, and goes on after `resume`.
    Pause {
        /// Its name; all where there is none.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        tier: Option<String>,
    },
    /// Goes on.
    Resume {
        /// Its name; all where there is none.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        tier: Option<String>,
    },
    /// Other caps from now on, until the runner ends.
    SetCaps {
        /// Its name.
        tier: String,
        /// Bytes a second out of it; 0 for no limit, left as it is where there is none.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        read: Option<u64>,
        /// Bytes a second into it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        write: Option<u64>,
    },
    /// Gives a step a name: it comes to every tier, and no rule removes it.
    Pin {
        /// Which.
        step: u64,
        /// Letters, digits, `.`, `-` and `_`. A name that was another step's is moved.
        name: String,
    },
    /// Takes a name away.
    Unpin {
        /// Which.
        name: String,
    },
    /// Holds a step: nothing of Forebay removes it anywhere until it is released.
    Hold {
        /// Which.
        step: u64,
        /// Why, for people.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        why: Option<String>,
    },
    /// Ends a hold.
    Release {
        /// Of which step.
        step: u64,
    },
    /// Copies a step to a folder with a name, which no rule removes.
    Promote {
        /// Which.
        step: u64,
        /// The folder's name.
        name: String,
        /// Where that folder is made: a path, or the name of a tier; beside the steps of the last tier where there is
        /// none.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        to: Option<String>,
        /// Also writes the tensors as safetensors, to a folder `NAME-safetensors` beside it.
        #[serde(default)]
        export: bool,
    },
    /// Applies the rules of what stays, now.
    Prune {
        /// Only says what would be removed.
        #[serde(default)]
        dry_run: bool,
    },
    /// Something was saved: look now.
    Wake,
}

/// What came of an action.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outcome {
    /// What was done, in a line for people.
    pub done: String,
    /// What else there is to know, a line each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// Of a prune: what was removed, or would be.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub removed: Vec<RemovedStep>,
    /// What went wrong while the rest was done, a line each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub failed: Vec<String>,
}

/// A step that was removed from a tier, or would be.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemovedStep {
    /// The tier's name.
    pub tier: String,
    /// Which step.
    pub step: u64,
    /// Whose commit it was.
    pub attempt: String,
    /// Its bytes.
    pub bytes: u64,
}

impl Action {
    /// Its name, as in JSON.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Pause { .. } => "pause",
            Self::Resume { .. } => "resume",
            Self::SetCaps { .. } => "set_caps",
            Self::Pin { .. } => "pin",
            Self::Unpin { .. } => "unpin",
            Self::Hold { .. } => "hold",
            Self::Release { .. } => "release",
            Self::Promote { .. } => "promote",
            Self::Prune { .. } => "prune",
            Self::Wake => "wake",
        }
    }
}

impl Outcome {
    /// Nothing but this line.
    pub(crate) fn of(done: impl Into<String>) -> Self {
        Self { done: done.into(), ..Self::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn actions_are_read_and_unknown_fields_are_errors() {
        let read = |text: &str| serde_json::from_str::<Action>(text);
        assert_eq!(read(r#"{"action":"pause"}"#).unwrap(), Action::Pause { tier: None });
        let pin = Action::Pin { step: 7, name: "best".to_owned() };
        assert_eq!(read(r#"{"action":"pin","step":7,"name":"best"}"#).unwrap(), pin);
        assert_eq!(read(&serde_json::to_string(&pin).unwrap()).unwrap(), pin);
        let prune = read(r#"{"action":"prune"}"#).unwrap();
        assert_eq!(prune, Action::Prune { dry_run: false });
        assert_eq!(prune.name(), "prune");
        for bad in [r#"{"action":"pin","step":7}"#, r#"{"action":"burn"}"#, r#"{"step":7}"#] {
            assert!(read(bad).is_err(), "{bad}");
        }
        assert!(read(r#"{"action":"prune","dryrun":true}"#).is_err());
    }
}
