//! For unit tests: work that stands still, as plain data. Tests of the agent at work are in `tests/`, on real tiers.

use std::sync::{Arc, Mutex};

use forebay_error::Result;
use forebay_tier::status::{
    CopiesStatus, CopyNode, CopyState, CopyStep, Health, Status, StepStatus, TierStatus, Transfer,
    Trouble,
};
use serde_json::{Value, json};

use crate::work::Work;

pub(crate) struct Still {
    status: Status,
    pub(crate) acts: Mutex<Vec<(Value, String)>>,
}

impl Still {
    pub(crate) fn new(status: Status) -> Arc<Self> {
        Arc::new(Self { status, acts: Mutex::default() })
    }
}

impl Work for Still {
    fn status(&self) -> Status {
        self.status.clone()
    }

    fn wake(&self) {}

    fn act(&self, action: &Value, who: &str) -> Result<Value> {
        self.acts.lock().unwrap().push((action.clone(), who.to_owned()));
        Ok(json!({"done": true}))
    }
}

/// What tries to be markup, a quote, a line, and something that steers a terminal.
pub(crate) const HOSTILE: &str = "<script>alert(1)</script>\"'&\n\u{1b}[31m\u{202e}x";

/// Three tiers with everything that can be shown.
pub(crate) fn busy() -> Status {
    let tier = |name: &str, place: &str, health, used, capacity| TierStatus {
        name: name.to_owned(),
        place: place.to_owned(),
        health,
        used_bytes: used,
        capacity_bytes: capacity,
        committed: 3,
        read_bytes: 5_000_000_000,
        written_bytes: 7_000_000_000,
        read_rate: 1.2e9,
        write_rate: 3.4e8,
        ..TierStatus::default()
    };
    let mut tiers = vec![
        tier("nvme", "/local/ckpt", Health::Ok, 48_000_000_000, Some(64_000_000_000)),
        tier("lustre", "/shared/run1", Health::Troubled, 160_000_000_000, None),
        tier("archive", "s3://runs/run1", Health::Down, 0, Some(0)),
    ];
    tiers[1].paused = true;
    tiers[1].write_cap = Some(500_000_000);
    tiers[2].notes = vec![HOSTILE.to_owned()];
    let step = |step, copies: [CopyState; 3]| StepStatus {
        step,
        attempt: format!("e1-{step}"),
        bytes: 16_000_000_000,
        age_seconds: 90.0,
        pins: Vec::new(),
        held: false,
        copies: copies.to_vec(),
    };
    use CopyState::{Absent, Committed, Moving, Other, Partial, Waiting};
    let mut steps = vec![
        step(100, [Absent, Committed, Committed]),
        step(200, [Committed, Partial, Other]),
        step(300, [Committed, Moving, Waiting]),
    ];
    steps[0].pins = vec![HOSTILE.to_owned(), "golden".to_owned()];
    steps[0].held = true;
    Status {
        who: "node-17 pid 4242".to_owned(),
        up_seconds: 90_000.0,
        tiers,
        steps,
        transfers: vec![Transfer {
            step: 300,
            from: 0,
            to: 1,
            priority: "newest".to_owned(),
            done_bytes: 4_000_000_000,
            total_bytes: 16_000_000_000,
            rate: 3.4e8,
            left_seconds: Some(35.0),
            tries: 1,
        }],
        waiting: 1,
        errors: vec![Trouble {
            at: 1_790_000_000.0,
            tier: Some(2),
            step: Some(200),
            code: "io".to_owned(),
            what: format!("the bucket said 503 SlowDown {HOSTILE}"),
            again_seconds: Some(8.0),
        }],
        copies: Some(copies()),
    }
}

/// Copies on another node.
fn copies() -> CopiesStatus {
    CopiesStatus {
        drive: "00000000000000aa".to_owned(),
        wanted: 1,
        steps: vec![CopyStep {
            step: 300,
            files: 2,
            bytes: 16_000_000_000,
            on: vec![HOSTILE.to_owned()],
        }],
        nodes: vec![CopyNode {
            host: HOSTILE.to_owned(),
            drive: "00000000000000bb".to_owned(),
            url: HOSTILE.to_owned(),
            is_alive: true,
            error: Some(format!("there is no room for a copy {HOSTILE}")),
        }],
        held_files: 3,
        held_bytes: 24_000_000_000,
        sent_bytes: 16_000_000_000,
        received_bytes: 24_000_000_000,
        failures: 2,
        error: Some(HOSTILE.to_owned()),
    }
}
