//! Copies of what is on the drive of a node, on the drives of others: losing a node then does not lose the newest step.
//!
//! Where the first tier is on the drives of nodes, records are in one place and each drive has the data of its own
//! ranks. A *copy* is such a file on another drive too, under the same name. Nothing else is new: what counts whose
//! data are where (`ranks_here`, `missing`) counts copies, what verifies them is the manifest's checksums, and the
//! holder of a copy can bring it to the next tier as it brings its own.
//!
//! ```text
//! .forebay/peers/<drive>/told               who has that drive, and is alive           (records: all nodes see it)
//! .forebay/here/drive                       the drive's own name, 16 hex digits        (on the drive, as all below)
//! .forebay/here/copies/step-<N>/<file>      the file of that name is a copy, and whose
//! .forebay/here/damaged/step-<N>/<file>     the own file of that name is damaged
//! .forebay/here/incoming/<16 hex digits>    a copy that is on its way
//! ```
//!
//! The owner of a file brings it to the next tier; the holder of a copy does where the owner cannot: it has not been
//! heard of for as long as it announced, or has said that it lacks the file. A mark is made before its file gets its
//! name, so no copy is ever taken for a node's own: it is not copied on, and goes once its step is in one place, or
//! nowhere.
//!
//! | module | what it does |
//! | --- | --- |
//! | `peers` | the drive's name; announcements of who has which drive |
//! | `ring` | whose drives get copies of whose |
//! | `marks` | which files are copies |
//! | `receive` | takes a copy from somebody who is not trusted |
//! | `damaged` | files that are here and of no use |
//! | `give` | which files are to be copied; reads one, checked |
//! | `tidy` | removes copies that nobody needs any more |

mod damaged;
mod give;
mod marks;
mod peers;
mod receive;
mod ring;
mod tidy;

use crate::config::IoPriority;

pub use give::Giving;
pub use marks::{Mark, mark_lacking, marks};
pub use peers::{Announcement, DriveId, Peer, Peers, announce, drive_id, peer, withdraw};
pub use receive::{Begun, Incoming, Receiver};
pub use ring::buddies;
pub use tidy::Tidied;

pub(crate) use damaged::note as note_damaged;
pub(crate) use marks::here;

/// For a thread that copies: the disk treats it as one that moves steps.
pub fn be_modest(io_priority: IoPriority) {
    crate::runner::io_priority::set(io_priority);
}
