//! What the agent shows and steers: one job's tiers, behind a small interface, so that the servers here know nothing of
//! how steps are moved.

use forebay_error::Result;
use forebay_tier::status::Status;
use serde_json::Value;

/// The tiers of one job at work. Calls may block on files and networks, and come from any thread.
pub(crate) trait Work: Send + Sync {
    /// How it stands.
    fn status(&self) -> Status;

    /// Something was saved: look now instead of later.
    fn wake(&self);

    /// Carries out an action, given as the JSON of `forebay_tier::runner::Action`, for `who` (recorded in the audit
    /// log), and says what came of it. Errors: `usage` for what is no action; those of the action.
    fn act(&self, action: &Value, who: &str) -> Result<Value>;
}
